"""What the identity of a model holds, and what it leaves out."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from nimble_jobs import machine
from nimble_jobs.errors import ModelChanged, ModelError
from nimble_jobs.models import identity, weights_identity
from nimble_jobs.models.identity import _owners
from nimble_jobs.models.local_files import local_files
from nimble_jobs.spec.model import ModelSpec


def project(folder: Path) -> Path:
    """A model file with neighbours: plain, relative, in packages, in functions; and one that nothing imports."""
    texts = {
        "net.py": "import torch, json\nimport helper\nfrom pkg import layers\nfrom . import sibling\n"
        "def make():\n    import late\n",
        "helper.py": "from pkg.deep import thing\nimport random\n",
        "sibling.py": "",
        "late.py": "",
        "random.py": "",  # `import random` means the standard library
        "unused.py": "",
        "pkg/__init__.py": "",
        "pkg/layers.py": "from .more import *\nfrom .. import up\n",
        "pkg/more.py": "",
        "pkg/deep/__init__.py": "",
        "pkg/deep/thing.py": "",
        "up.py": "import torchvision.models\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "net.py"


def of(file: Path, **more: object) -> dict[str, str]:
    return identity(ModelSpec(source=f"python:{file}:make", **more))  # type: ignore[arg-type]


def test_torchvision_parts_are_readable() -> None:
    """Source, package version, canonical arguments and dtype; neither seed nor weights file."""
    spec = ModelSpec(source="torchvision:resnet18", args={"b": 1, "a": [2.0]}, seed=7, weights="/w.pt", dtype="fp16")
    parts = identity(spec)
    assert parts["model.source"] == "torchvision:resnet18"
    assert parts["model.args"] == '{"a":[2.0],"b":1}'
    assert parts["model.dtype"] == "fp16"
    assert parts["model.package"].startswith("torchvision 0.")
    assert parts == identity(spec.model_copy(update={"seed": 1, "weights": None}))


def test_named_weights_are_a_part() -> None:
    """A torchvision entry may change sizes and input steps, so it belongs to the structure."""
    spec = ModelSpec(source="torchvision:inception_v3", weights="DEFAULT")
    assert identity(spec)["model.weights_entry"] == "DEFAULT"
    assert weights_identity(spec) == "torchvision:DEFAULT"


# One of each family whose builder reads the entry.
FAMILIES = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b1", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet50", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vit_b_16", "vit_b_32",
]  # fmt: skip


def structure(module: nn.Module) -> list[object]:
    """Types, plain attributes, and sizes of every part of a module."""
    plain = (int, float, str, bool, tuple, list, type(None))
    found: list[object] = [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]
    for name, part in module.named_modules():
        values = sorted((key, repr(value)) for key, value in vars(part).items() if isinstance(value, plain))
        found.append((name, type(part).__qualname__, values))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_named_weights_count_where_they_change_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is left out builds the very same modules as random weights, and as a file of fine-tuned ones."""
    from torchvision import models

    monkeypatch.setattr(models.WeightsEnum, "get_state_dict", lambda *_, **__: {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_, **__: None)
    builder = models.get_model_builder(name)
    device = "cpu" if name.startswith("regnet") else "meta"
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of how googlenet and inception_v3 begin
        plain = structure(builder())
        for entry, weights in models.get_model_weights(name).__members__.items():
            parts = identity(ModelSpec(source=f"torchvision:{name}", weights=entry))
            if "model.weights_entry" not in parts:
                assert structure(builder(weights=weights)) == plain
                assert parts == identity(ModelSpec(source=f"torchvision:{name}", weights="/fine-tuned.pt"))
    assert ("model.weights_entry" in identity(ModelSpec(source=f"torchvision:{name}", weights="IMAGENET1K_V1"))) == (
        name in ("googlenet", "inception_v3")
    )


def test_python_files_are_found_transitively(tmp_path: Path) -> None:
    """Each local module that the file can import has its own digest; others have none."""
    files = {k.removeprefix("model.file:") for k in of(project(tmp_path)) if k.startswith("model.file:")}
    assert files == {
        "net.py", "helper.py", "sibling.py", "late.py", "up.py",
        "pkg/__init__.py", "pkg/layers.py", "pkg/more.py", "pkg/deep/__init__.py", "pkg/deep/thing.py",
    }  # fmt: skip


def test_imported_packages_have_their_versions(tmp_path: Path) -> None:
    """Installed packages are named with versions; one that nothing provides is said to be unknown."""
    main = project(tmp_path)
    (tmp_path / "late.py").write_text("import yaml\nimport no_such_thing_at_all\n")
    package = of(main)["model.package"]
    assert "torchvision 0." in package
    assert "yaml (PyYAML " in package
    assert "no_such_thing_at_all (unknown)" in package


def test_owners_of_modules_are_found_as_python_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and single modules, of one distribution or several, whether it names them or only lists its files."""
    files = {
        "a-1.dist-info/METADATA": "Name: a\nVersion: 1\n",
        "a-1.dist-info/RECORD": "a-1.dist-info/METADATA,,\nshared_xq/one.py,,\nsingle_xq.py,,\nwithin/hidden_xq.py,,\n",
        "b-2.dist-info/METADATA": "Name: b\nVersion: 2\n",
        "b-2.dist-info/RECORD": "shared_xq/two.py,,\ncompiled_xq.py,,\n",
        "c-3.dist-info/METADATA": "Name: c\nVersion: 3\n",
        "c-3.dist-info/top_level.txt": "declared_xq\n",
        "c-3.dist-info/RECORD": "undeclared_xq/x.py,,\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    known = importlib.metadata.packages_distributions()
    own = ("shared_xq", "single_xq", "hidden_xq", "compiled_xq", "declared_xq", "undeclared_xq")
    found = {name: _owners(name) for name in (*own, "PIL", "yaml", "torch")}
    assert found == {name: sorted(set(known.get(name, ()))) for name in found}
    assert (found["shared_xq"], found["hidden_xq"]) == (["a", "b"], [])


@pytest.mark.parametrize("changed", ["net.py", "pkg/deep/thing.py", "late.py"])
def test_any_used_file_changes_the_identity(tmp_path: Path, changed: str) -> None:
    """One more byte in a used file is another model."""
    main = project(tmp_path)
    before = of(main)
    with (tmp_path / changed).open("a") as f:
        f.write("\n")
    assert of(main) != before


def test_unused_files_do_not_count(tmp_path: Path) -> None:
    """A neighbour that nothing imports is not part of the model."""
    main = project(tmp_path)
    before = of(main)
    (tmp_path / "unused.py").write_text("changed")
    (tmp_path / "random.py").write_text("changed")
    assert of(main) == before


def test_no_absolute_path_in_it(tmp_path: Path) -> None:
    """The same files in another folder have the same identity, and so has a symbolic link to them."""
    main = project(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    first = of(main)
    assert first == of(tmp_path / "b" / "net.py") == of(tmp_path / "link" / "net.py")
    assert str(tmp_path) not in str(first)


def test_a_file_with_a_syntax_error_still_counts(tmp_path: Path) -> None:
    """Its digest is there; that it cannot run is said when it is built."""
    (tmp_path / "net.py").write_text("def (")
    assert list(local_files(tmp_path / "net.py").files) == ["net.py"]


def test_circular_imports_end(tmp_path: Path) -> None:
    """Two files that import each other are both found."""
    (tmp_path / "net.py").write_text("import other")
    (tmp_path / "other.py").write_text("import net")
    found = local_files(tmp_path / "net.py")
    assert list(found.files) == ["net.py", "other.py"]
    assert found.packages == frozenset()


def test_exported_and_transformers_use_digests(tmp_path: Path) -> None:
    """A .pt2 is named by its digest, a transformers folder by that of config.json."""
    (tmp_path / "m.pt2").write_bytes(b"x" * (2 << 20))
    first = identity(ModelSpec(source=f"exported:{tmp_path / 'm.pt2'}"))
    (tmp_path / "m.pt2").write_bytes(b"y" * (2 << 20))
    assert len(first["model.file:m.pt2"]) == 64
    assert first != identity(ModelSpec(source=f"exported:{tmp_path / 'm.pt2'}"))
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert identity(ModelSpec(source=f"transformers:{tmp_path}"))["model.source"] == "transformers:BertModel"


def test_missing_files_and_bad_arguments_are_named(tmp_path: Path) -> None:
    """ModelError says which file is missing and which value JSON cannot hold."""
    with pytest.raises(ModelError, match=r"nothing\.py: no such file"):
        of(tmp_path / "nothing.py")
    with pytest.raises(ModelError, match=r"model\.args: .*expected text, numbers"):
        identity(ModelSpec(source="torchvision:resnet18", args={"x": object()}))
    with pytest.raises(ModelError, match="only torchvision models have named weights"):
        identity(ModelSpec(source="timm:resnet18", weights="DEFAULT"))


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message holds the command to type."""
    from importlib import metadata

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine, "installed_version", absent)
    with pytest.raises(ModelError, match=r"pip install 'nimble-jobs\[timm\]'"):
        identity(ModelSpec(source="timm:resnet18"))


def test_weights_identity_tells_files_and_seeds_apart(tmp_path: Path) -> None:
    """A file is known by path, size, time and inode; without one the seed decides."""
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"1")
    spec = ModelSpec(source="torchvision:resnet18", weights=str(file))
    first = weights_identity(spec)
    file.write_bytes(b"22")
    assert weights_identity(spec) != first
    assert weights_identity(ModelSpec(source="torchvision:resnet18", seed=5)) == "seed:5"
    file.unlink()
    with pytest.raises(ModelError, match=r"w\.safetensors"):
        weights_identity(spec)


def test_identity_does_not_load_torch(tmp_path: Path) -> None:
    """Importing the package and asking for an identity leaves torch and torchvision out."""
    main = project(tmp_path)
    code = (
        "import sys\nfrom nimble_jobs.models import identity, weights_identity\n"
        "from nimble_jobs.spec.model import ModelSpec\n"
        f"for s in ('torchvision:resnet50', 'python:{main}:make'):\n"
        "    identity(ModelSpec(source=s)); weights_identity(ModelSpec(source=s))\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'torchvision', 'timm', 'transformers')))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("statement", "files"),
    [
        ("import importlib; importlib.import_module('helper')", ["helper.py"]),
        ("from importlib import import_module as f, import_module; import_module('pkg.sub.deep')", ["pkg/sub/deep.py"]),
        ("__import__('helper')", ["helper.py"]),
        ("import importlib; importlib.import_module('.helper', __package__)", ["helper.py"]),
        ("import pkg.inner", ["pkg/inner/__init__.py", "pkg/inner/near.py"]),
        ("from pkg import inner as x", ["pkg/inner/__init__.py", "pkg/inner/near.py"]),
        ("from pkg.inner import *", ["pkg/inner/__init__.py", "pkg/inner/near.py", "pkg/inner/part/__init__.py"]),
        ("import pkg.sub.deep as d", ["pkg/sub/deep.py"]),  # folders without __init__.py
        ("from pkg.inner.up import x", ["helper.py", "pkg/inner/__init__.py", "pkg/inner/near.py", "pkg/inner/up.py"]),
        ("try:\n    import helper\nexcept ImportError:\n    pass", ["helper.py"]),
        ("class A:\n    def f(self):\n        from . import helper", ["helper.py"]),
        ("import importlib; importlib.import_module(name)", []),
        ("import importlib; importlib.import_module('')", []),
        ("import importlib; importlib.import_module('....helper', __package__)", []),
        ("import random", []),
    ],
)
def test_every_form_of_import_is_seen(tmp_path: Path, statement: str, files: list[str]) -> None:
    """Statements, wherever they stand, and calls with a literal name; through packages with and without __init__.py."""
    texts = {
        "helper.py": "",
        "random.py": "",
        "pkg/inner/__init__.py": "from . import near",
        "pkg/inner/near.py": "",
        "pkg/inner/part/__init__.py": "",
        "pkg/inner/up.py": "from importlib import import_module\nimport_module('...helper', __package__)",
        "pkg/sub/deep.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "net.py").write_text(statement)
    found = set(local_files(tmp_path / "net.py").files) - {"net.py"}
    if "*" in statement:
        assert set(files) <= found
    else:
        assert found == set(files)


@pytest.fixture
def import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path in which nothing is installed."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_code_on_the_import_path_counts_by_its_bytes(tmp_path: Path, import_path: Path) -> None:
    """A package that no installation gave a version changes the identity with any of its files, and with what it
    imports from the import path itself.
    """
    package = import_path / "beside_the_project"
    (package / "deep").mkdir(parents=True)
    for name, text in {"__init__.py": "", "deep/a.py": "import further_module, yaml\n", "notes.txt": ""}.items():
        (package / name).write_text(text)
    (import_path / "further_module.py").write_text("x = 1\n")
    (import_path / "unused_module.py").write_text("x = 1\n")
    (tmp_path / "net.py").write_text("from beside_the_project.deep import a\n")
    before = of(tmp_path / "net.py")
    assert {n for n in before if n.startswith("model.code:")} == {
        "model.code:beside_the_project",
        "model.code:further_module",
    }
    for file, part in [
        (package / "deep" / "a.py", "beside_the_project"),
        (package / "__init__.py", "beside_the_project"),
        (import_path / "further_module.py", "further_module"),
        (import_path / "unused_module.py", None),
        (package / "notes.txt", None),
    ]:
        first = of(tmp_path / "net.py")
        with file.open("a") as opened:
            opened.write("\n")
        found = of(tmp_path / "net.py")
        assert {n for n in found if found[n] != first[n]} == ({f"model.code:{part}"} if part else set())
    assert "beside_the_project" not in sys.modules


def test_installed_packages_count_by_their_version(tmp_path: Path) -> None:
    """Nothing of them is read."""
    (tmp_path / "net.py").write_text("import numpy, yaml, torchvision\nimport nowhere_to_be_found\n")
    assert not [name for name in of(tmp_path / "net.py") if name.startswith("model.code:")]


def test_imported_code_that_changes_is_refused(tmp_path: Path, import_path: Path) -> None:
    """This process would go on with the old code, under the name of the new one. What is not imported may change, and
    what is changed back is what runs.
    """
    helper = import_path / "changes_while_imported.py"
    helper.write_text("factor = 2.0\n")
    (tmp_path / "net.py").write_text("import changes_while_imported\n")
    of(tmp_path / "net.py")
    helper.write_text("factor = 3.0\n")
    before = of(tmp_path / "net.py")
    importlib.import_module("changes_while_imported")
    try:
        helper.write_text("factor = 4.0\n")
        for _ in range(2):
            with pytest.raises(
                ModelChanged, match="code of changes_while_imported changed after this process imported"
            ):
                of(tmp_path / "net.py")
        helper.write_text("factor = 3.0\n")
        assert of(tmp_path / "net.py") == before
    finally:
        del sys.modules["changes_while_imported"]


def test_an_imported_package_that_is_upgraded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version on disk is not that of the code that this process has."""
    importlib.import_module("torchvision")
    spec = ModelSpec(source="torchvision:resnet18")
    identity(spec)
    monkeypatch.setattr(machine, "installed_version", lambda _name: "99.0")
    with pytest.raises(ModelChanged, match=r"version of torchvision changed .* 99\.0 now"):
        identity(spec)


def test_weights_of_sentence_models(tmp_path: Path) -> None:
    """Those of linear layers count too. Modules without weights need no folder: archives leave empty ones out."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    entries = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "2_Dense").mkdir()
    for name in ("config.json", "model.safetensors", "2_Dense/model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    found = weights_identity(ModelSpec(source=f"transformers:{tmp_path}"))
    assert [part.split(":")[0] for part in found.split()] == [
        str(tmp_path / "model.safetensors"), str(tmp_path / "2_Dense/model.safetensors"),
    ]  # fmt: skip
