"""Private names of torch lie in `engine/private/` and `engine/inductor.py`, so that a new torch is met in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nimble_jobs

ROOT = Path(nimble_jobs.__file__).parent
THEIR_PLACE = ("engine/private/", "engine/inductor.py")
ELSEWHERE = {
    "bench/busy.py": "reads events of torch's profiler",
    "bench/measure.py": "empties the caches of the compilers that it measures",
}
OF_TENSORS = {"_version", "_cdata", "_backward_hooks", "_post_accumulate_grad_hooks"}
OF_MODULES = {"_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks"}
OFTEN_OURS = {"_parameters", "_buffers", "_modules"}  # torch's on a module, and names of our own on `self`


def private_names(source: str) -> Iterator[str]:
    """Private names of torch in a file, each as it is written there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for path in (f"{node.module}.{alias.name}" for alias in node.names):
                if any(part.startswith("_") for part in path.split(".")):
                    yield path
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            root = whole.partition(".")[0]
            hidden = node.attr.startswith("_") and not node.attr.startswith("__")
            of_torch = root in ("torch", "nn") and hidden and not whole.startswith("torch.ops.")  # names of operators
            of_objects = node.attr in OF_TENSORS | OF_MODULES or (node.attr in OFTEN_OURS and root != "self")
            if of_torch or (of_objects and root != "self"):
                yield whole


def test_private_names_of_torch_have_one_place() -> None:
    """Other files ask that place."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        names = [] if name.startswith(THEIR_PLACE) else list(private_names(path.read_text()))
        if names:
            found[name] = names
    assert {name: names for name, names in found.items() if name not in ELSEWHERE} == {}
    assert ELSEWHERE.keys() == found.keys(), "these have none any more: take them off the list"


def test_a_private_name_is_found() -> None:
    """In imports, behind torch, and on tensors and modules."""
    source = "from torch.utils import _pytree\ntorch._foreach_add_(a, b)\nx._version\nm._parameters\nself._parameters\n"
    assert set(private_names(source)) == {"torch.utils._pytree", "torch._foreach_add_", "x._version", "m._parameters"}
    assert list(private_names("torch.nn.Linear\nself._version\ntorch.ops.aten._conj\nimport torch\n")) == []


BY_NAME = {  # files that may ask for a device by its name
    "cli/doctor.py": "prints what this machine's GPU is",
    "engine/device.py": "holds the table",
    "engine/into.py": "calls operators of cuDNN",
    "engine/memory.py": "asks whether tensors lie on the host",
    "engine/nvjpeg.py": "compiled by TorchScript, which cannot call the table",
    "engine/pictures.py": "gives a CUDA device its index",
    "engine/private/runtime.py": "lies below the table",
    "engine/recorder.py": "asks whether tensors lie on the host",
    "engine/resize.py": "keeps memory for the kernel's table on CUDA devices",
    "models/from_exported.py": "asks whether tensors lie on the host",
}


def test_devices_are_asked_for_abilities_and_not_for_names() -> None:
    """A new type of device is then a line in a table. The benchmark names the devices of other runtimes."""
    asks = re.compile(r"\.type (?:==|!=) \"(?:cuda|cpu)\"")
    names = (p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if asks.search(p.read_text()))
    found = {name for name in names if not name.startswith("bench/")}
    assert sorted(found - BY_NAME.keys()) == []
    assert sorted(BY_NAME.keys() - found) == [], "these ask for none any more: take them off the list"
