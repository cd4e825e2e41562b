"""Files and functions stay small enough to be read at once; each that is larger says why here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nimble_jobs

ROOT = Path(nimble_jobs.__file__).parent
FILE_LINES, FUNCTION_LINES, PARAMETERS = 350, 60, 8

LARGER = {  # FILE or FILE:FUNCTION, below nimble_jobs
    "client.py:submit": "each parameter is an option of a job, given by keyword",
    "kernels/attention_triton.py:_taken_in": "a kernel takes every size and stride by itself",
    "kernels/attention_triton.py:attention": "a kernel takes every size and stride by itself",
    "kernels/depthwise_triton.py:depthwise_channels_last": "a kernel takes every size and stride by itself",
    "kernels/depthwise_triton.py:depthwise_contiguous": "a kernel takes every size and stride by itself",
    "kernels/dilated_triton.py:dilated": "a kernel takes every size by itself",
    "kernels/pointwise_triton.py:pointwise": "a kernel takes every size by itself",
    "kernels/product_gelu_triton.py:product_gelu": "a kernel takes every size by itself",
    "kernels/product_gelu_triton.py:product_gelu_many": "a kernel takes every size by itself",
    "engine/resize_triton.py:resize_ragged": "a kernel takes every size and constant by itself",
    "kernels/separable.py:_computed": "computes an operator, whose arguments are by position",
    "kernels/separable_triton.py:separable": "a kernel takes every size by itself",
    "kernels/squeeze_excite_triton.py:squeeze": "a kernel takes every size by itself",
    "kernels/squeeze_excite_triton.py:excite": "a kernel takes every size by itself",
    "kernels/split_k_triton.py:split_k": "a kernel takes every size by itself",
    "engine/inductor.py:_launch_kernel": "stands in for a function of torch",
    "engine/verify.py:check": "says all that a check needs, by keyword",
    "nimble/interface.py:prepare": "each parameter is an option of the caller's, given by keyword",
    "planner/forward/build.py:build_best": "each parameter after the device is an option, given by keyword",
    "planner/forward/restore.py:check_loaded": "passes on what `verify.check` needs, by keyword",
    "planner/step/prepare.py:prepare_stored_step": "each parameter after the key's parts is given by keyword",
    "planner/step/record.py:record_step": "each parameter after the device is given by keyword",
    "planner/step/validation.py:prepare_forward": "each parameter after the key's parts is given by keyword",
    "queue.py:submit_array": "each parameter is an option of a job, given by keyword",
    "store/claims.py:finish": "each parameter after the attempt is a fact about its end, given by keyword",
    "store/migrations/versions/0001_first.py:upgrade": "a list of tables",
    "workloads/record_feed.py:__init__": "each parameter after the stages is given by keyword",
}


def too_large(name: str, source: str) -> Iterator[str]:
    """What is larger than the limits: FILE, or FILE:FUNCTION."""
    if len(source.splitlines()) > FILE_LINES:
        yield name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            command = name.startswith("cli/")  # the options of a command are its parameters
            first = node.body[0].lineno if command else node.lineno
            assert node.end_lineno is not None
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            many = len(given) - (given[:1] != [] and given[0].arg in ("self", "cls")) > PARAMETERS
            if node.end_lineno - first + 1 > FUNCTION_LINES or (many and not command):
                yield f"{name}:{node.name}"


def test_files_and_functions_are_small() -> None:
    """At most 350 lines a file, 60 a function, and 8 parameters outside the commands, unless a reason is listed."""
    found = set[str]()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        found.update(too_large(name, path.read_text()))
    assert sorted(found - LARGER.keys()) == []
    assert sorted(LARGER.keys() - found) == [], "these are small now: take them off the list"


def test_what_is_too_large_is_found() -> None:
    """A line or a parameter more than allowed is enough; in a command, parameters and their lines do not count."""
    eight, nine = (", ".join(f"p{i}" for i in range(n)) for n in (8, 9))
    body = "    pass\n"
    assert list(too_large("a.py", f"def f({eight}):\n{59 * body}")) == []
    assert list(too_large("a.py", f"class C:\n def f(self, {eight}):\n  pass")) == []
    assert list(too_large("a.py", f"def f():\n{60 * body}")) == ["a.py:f"]
    assert list(too_large("a.py", f"def f({nine}):\n{body}")) == ["a.py:f"]
    assert list(too_large("a.py", f"async def f(*, {nine}):\n{body}")) == ["a.py:f"]
    assert list(too_large("cli/a.py", f"def f(\n{nine}\n):\n{60 * body}")) == []
    assert list(too_large("cli/a.py", f"def f(\n{nine}\n):\n{61 * body}")) == ["cli/a.py:f"]
    assert list(too_large("a.py", 351 * "\n")) == ["a.py"]
