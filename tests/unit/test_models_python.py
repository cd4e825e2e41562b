"""Models from Python files of the user's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.build import build
from nimble_jobs.spec.model import ModelSpec

NET = """
import torch
from torch import nn
import helper

class Net(nn.Module):
    def __init__(self, width=helper.WIDTH):
        super().__init__()
        self.linear = nn.Linear(2, width)

    def forward(self, x):
        return helper.double(self.linear(x))

def make(width=helper.WIDTH):
    return Net(width)

def wrong():
    return 3

def breaks():
    return helper.breaks()

def leaves():
    raise SystemExit(3)

def lazy():
    return nn.LazyLinear(3)

def late():
    import pkg.part
    return nn.Linear(2, pkg.part.SIZE)
"""
HELPER = """
WIDTH = {width}

def double(x):
    return x * 2

def breaks():
    raise ValueError("not today")
"""


def project(folder: Path, width: int = 3) -> Path:
    (folder / "pkg").mkdir(parents=True)
    (folder / "net.py").write_text(NET)
    (folder / "helper.py").write_text(HELPER.format(width=width))
    (folder / "pkg" / "__init__.py").write_text("from .part import SIZE\nfrom .. import helper\n")
    (folder / "pkg" / "part.py").write_text("import helper\nSIZE = helper.WIDTH + 1\n")
    return folder / "net.py"


def of(file: Path, factory: str = "make", *, allowed: Path | None = None, **more: Any) -> nn.Module:
    spec = ModelSpec(source=f"python:{file}:{factory}", **more)
    return build(spec, allowed_python=[allowed or file.parent])


def test_a_factory_gets_its_arguments(tmp_path: Path) -> None:
    """A function or a class of the file makes the module; neighbours are imported; it is ready to run."""
    main = project(tmp_path / "a")
    module = of(main, args={"width": 5}, dtype="bf16")
    assert module(torch.zeros(1, 2, dtype=torch.bfloat16)).shape == (1, 5)
    assert not module.training
    assert of(main, "Net")(torch.zeros(1, 2)).shape == (1, 3)
    assert of(main, "late").weight.shape == (4, 2)


def test_equal_names_do_not_meet(tmp_path: Path) -> None:
    """Two folders with neighbours of the same name each get their own, and no short name stays behind."""
    path, names = list(sys.path), set(sys.modules)
    first, second = (of(project(tmp_path / n, w)) for n, w in (("a", 3), ("b", 7)))
    assert first(torch.zeros(1, 2)).shape == (1, 3)
    assert second(torch.zeros(1, 2)).shape == (1, 7)
    assert sys.path == path
    assert {n for n in set(sys.modules) - names if not n.startswith("_nimble_model_")} == set()


def test_a_changed_neighbour_is_read_anew(tmp_path: Path) -> None:
    """Edits count at once, even within one second and with the same size, where cached bytecode would be stale."""
    main = project(tmp_path / "a", 3)
    assert of(main).linear.out_features == 3
    (main.parent / "helper.py").write_text(HELPER.format(width=4))
    assert of(main).linear.out_features == 4
    assert not list(main.parent.rglob("*.pyc"))


def test_module_level_weights_follow_the_seed(tmp_path: Path) -> None:
    """The file runs again for each model, so what it draws at its top level comes from the seed."""
    (tmp_path / "m.py").write_text(
        "import torch\nW = torch.randn(3)\ndef make():\n"
        "    m = torch.nn.Module()\n    m.register_buffer('w', W)\n    return m\n"
    )
    first, again, other = (of(tmp_path / "m.py", seed=s).w for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_names_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that happens to be called like a neighbour is neither used nor lost."""
    monkeypatch.setitem(sys.modules, "helper", type(sys)("helper"))
    others = sys.modules["helper"]
    assert of(project(tmp_path / "a")).linear.out_features == 3
    assert sys.modules["helper"] is others


def test_the_standard_library_is_not_replaced(tmp_path: Path) -> None:
    """A neighbour called like a module of the standard library does not hide it."""
    (tmp_path / "colorsys.py").write_text("raise RuntimeError")
    (tmp_path / "m.py").write_text("import colorsys, torch\nmake = torch.nn.Identity\n")
    sys.modules.pop("colorsys", None)
    assert isinstance(of(tmp_path / "m.py"), nn.Identity)


def test_a_folder_does_not_hide_an_installed_package(tmp_path: Path) -> None:
    """A folder without __init__.py gives way to what is installed."""
    (tmp_path / "yaml").mkdir()
    (tmp_path / "m.py").write_text("import yaml, torch\nyaml.safe_load\nmake = torch.nn.Identity\n")
    sys.modules.pop("yaml", None)
    assert isinstance(of(tmp_path / "m.py"), nn.Identity)


def test_the_default_dtype_is_put_back(tmp_path: Path) -> None:
    """A file that changes torch's default dtype changes it for its own model only."""
    (tmp_path / "m.py").write_text("import torch\ntorch.set_default_dtype(torch.float64)\nmake = torch.nn.Identity\n")
    of(tmp_path / "m.py")
    assert torch.get_default_dtype() is torch.float32


def test_only_allowed_folders_run(tmp_path: Path) -> None:
    """Elsewhere nothing is executed, and the message says what to type. Links are followed before the decision."""
    main = project(tmp_path / "a")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "net.py").symlink_to(main)
    (main.parent / "net.py").write_text("raise SystemExit('it ran')")
    folder = main.parent
    for file in (main, tmp_path / "allowed" / "net.py"):
        with pytest.raises(ModelError) as e:
            of(file, allowed=tmp_path / "allowed")
        assert f"--allow-python {folder} or NIMBLE_JOBS_ALLOW_PYTHON={folder}" in str(e.value)
    with pytest.raises(ModelError, match="may not be run"):
        build(ModelSpec(source=f"python:{main}:make"))


def test_folders_below_an_allowed_one_are_allowed(tmp_path: Path) -> None:
    """But not folders whose name merely begins alike."""
    of(project(tmp_path / "ok" / "deep"), allowed=tmp_path / "ok")
    with pytest.raises(ModelError, match="may not be run"):
        of(project(tmp_path / "okay"), allowed=tmp_path / "ok")


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("breaks", {}, r"helper\.py:8: ValueError: not today$"),
        ("leaves", {}, r"net\.py:24: SystemExit: 3$"),
        ("wrong", {}, r"wrong in .*net\.py returned a int; expected a torch\.nn\.Module"),
        ("mkae", {}, r"net\.py has no function or class 'mkae'; did you mean make"),
        ("make", {"widht": 3}, r"^model\.args: make in .*net\.py: got an unexpected keyword argument 'widht'"),
        ("make", {"width": "x"}, r"net\.py:9: TypeError: "),
        ("lazy", {}, r"weight has no shape before a first call"),
    ],
)
def test_what_goes_wrong_is_told_with_its_place(
    tmp_path: Path, factory: str, args: dict[str, Any], message: str
) -> None:
    """Errors of the user's code carry file, line and the original words."""
    with pytest.raises(ModelError, match=message):
        of(project(tmp_path / "a"), factory, args=args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def (", r"m\.py:1: SyntaxError: "),
        ("\n\nimport nothing_like_this", r"m\.py:3: ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("from .. import x", r"m\.py:1: ImportError: "),
        ("1/0", r"m\.py:1: ZeroDivisionError: "),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str, message: str) -> None:
    """The same for what happens while the file runs, and no half-made module is left."""
    (tmp_path / "m.py").write_text(text)
    before = set(sys.modules)
    with pytest.raises(ModelError, match=message):
        of(tmp_path / "m.py")
    assert not any(n.startswith("_nimble_model_") for n in set(sys.modules) - before)
