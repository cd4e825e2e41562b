"""The key of a schedule: equal where nothing that matters differs, different where anything that may matter does."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nimble_jobs import machine
from nimble_jobs import spec as specs
from nimble_jobs.models import identity, steady
from nimble_jobs.planner import schedule_key
from nimble_jobs.planner.keys import request as request_module
from nimble_jobs.planner.keys.request import key_parts
from nimble_jobs.planner.lookup.why import differences
from nimble_jobs.spec import ModelSpec
from nimble_jobs.workloads.request import request_of
from tests.specs import Change, setting

CPU = torch.device("cpu")

FILES = {
    "net.py": "import helper\nfrom pkg import layers\nimport importlib\n"
    "late = importlib.import_module('pkg.late')\n\ndef make(a=1, b=2):\n    return layers.Net(helper.width)\n",
    "helper.py": "width = 3\n",
    "pkg/__init__.py": "\n",
    "pkg/layers.py": "from . import deep\n\nclass Net: ...\n",
    "pkg/deep/__init__.py": "x = 1\n",
    "pkg/late.py": "y = 1\n",
}


def project(folder: Path) -> Path:
    """A model of several files."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "net.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A spec that sets whatever the changes below change."""
    folder = tmp_path_factory.mktemp("key")
    return {
        "version": 1,
        "name": "base",
        "kind": "score",
        "model": {"source": f"python:{project(folder / 'one')}:make", "args": {"a": 1, "b": [1, 2], "c": {"d": 1.5}}},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": 4},
        "output": {"path": str(folder / "out"), "fields": ["id"]},
        "shape": [3, 8, 8],  # of a record, as the reader finds it; no field of a spec
        "dtype": "float32",
    }


def parts_of(spec: dict[str, Any], memory_bytes: int | None = None) -> dict[str, str]:
    """The parts of the key of a spec's job."""
    spec = copy.deepcopy(spec)
    shape, dtype = tuple(spec.pop("shape")), spec.pop("dtype")
    reader: Any = SimpleNamespace(signature=SimpleNamespace(shape=shape, dtype=dtype), packing=None)  # as in files
    parsed = specs.restore(spec)
    folder = Path(parsed.model.source.split(":")[1]).parent
    return key_parts(request_of(parsed, reader, CPU, (folder,), memory_bytes), CPU)


def moved(spec: dict[str, Any]) -> None:
    """The model's files in another folder."""
    file = Path(spec["model"]["source"].split(":")[1])
    spec["model"]["source"] = f"python:{project(file.parents[1] / 'two')}:make"


def reordered(spec: dict[str, Any]) -> None:
    spec["model"]["args"] = dict(reversed(spec["model"]["args"].items()))


def factory_changed(spec: dict[str, Any]) -> None:
    spec["model"]["source"] = spec["model"]["source"].removesuffix("make") + "other"


COSMETIC: dict[str, Change] = {
    "name": setting("name", "other"),
    "folder": moved,
    "order of arguments": reordered,
    "seed": setting("model.seed", 7),
    "weights": setting("model.weights", "/elsewhere/w.safetensors"),
    "dtype spelled out": setting("model.dtype", "fp32"),
    "input": setting("input.source", "/elsewhere/y.npy"),
    "format": setting("input.format", "images"),
    "fields": setting("input.fields", {"x": "records", "id": "ids"}),
    "precision of records": setting("dtype", "float64"),
    "nan": setting("input.allow_nan", True),
    "output": setting("output.path", "/elsewhere/out"),
    "output format": setting("output.format", "jsonl"),
    "output fields": setting("output.fields", ["id", "top1", "logits"]),
    "if exists": setting("output.if_exists", "replace"),
    "shards": setting("output.shard_size", 7),
    "defaults spelled out": setting("schedule", {"streams": "auto", "fuse": "auto", "in_flight": "auto"}),
    "kernels left on": setting("schedule.kernels", {"attention": True}),
    "default tolerance": setting("schedule.tolerance", 1e-3),
    "on miss": setting("schedule.on_miss", "eager"),
    "progressive": setting("schedule.progressive", True),
    "budget": setting("schedule.budget", 60.0),
    "device": setting("run.device", "cpu"),
    "priority": setting("run.priority", 5),
    "after": setting("run.after", ["another"]),
    "idempotency": setting("run.key", "k"),
    "timeout": setting("run.timeout", 60.0),
    "errors": setting("run.error_threshold", 0.5),
    "retry": setting("run.retry", {"max_attempts": 1}),
}
MATTERS: dict[str, tuple[Change, set[str]]] = {
    "factory": (factory_changed, {"model.source"}),
    "argument": (setting("model.args.a", 2), {"model.args"}),
    "whole number or not": (setting("model.args.a", 1.0), {"model.args"}),
    "order in a list": (setting("model.args.b", [2, 1]), {"model.args"}),
    "nested argument": (setting("model.args.c.d", 1.25), {"model.args"}),
    "further argument": (setting("model.args.e", None), {"model.args"}),
    "fp16": (setting("model.dtype", "fp16"), {"model.dtype", "input", "tolerance"}),
    "bf16": (setting("model.dtype", "bf16"), {"model.dtype", "input", "tolerance"}),
    "batch size": (setting("input.batch_size", 5), {"input"}),
    "height": (setting("shape", [3, 9, 8]), {"input"}),
    "order of sizes": (setting("shape", [8, 3, 8]), {"input"}),
    "dimensions": (setting("shape", [3, 64]), {"input"}),
    "integers": (setting("dtype", "int64"), {"input"}),
    "embedding": (setting("output.fields", ["id", "embedding"]), {"outputs"}),
    "one stream": (setting("schedule.streams", 1), {"schedule.streams"}),
    "two streams": (setting("schedule.streams", 2), {"schedule.streams"}),
    "no fusion": (setting("schedule.fuse", "off"), {"schedule.fuse"}),
    "more fusion": (setting("schedule.fuse", "max"), {"schedule.fuse"}),
    "in flight": (setting("schedule.in_flight", 2), {"schedule.in_flight"}),
    "tolerance": (setting("schedule.tolerance", 1e-4), {"tolerance"}),
}
# Both set the same: the tolerance that one spells out is not the other's default.
_CLASHES = {"fp16": {"default tolerance"}, "bf16": {"default tolerance"}}


@given(names=st.lists(st.sampled_from(sorted(COSMETIC)), unique=True))
@example(names=sorted(COSMETIC))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_cannot_matter_leaves_the_key_as_it_is(base: dict[str, Any], names: list[str]) -> None:
    """Any of them together: the very same parts."""
    spec = copy.deepcopy(base)
    for name in names:
        COSMETIC[name](spec)
    assert parts_of(spec) == parts_of(base)


def test_what_the_model_file_is_called_does_not_matter(tmp_path: Path) -> None:
    """Equal bytes under another name: the same key, though the parts show the name; and nothing that differs."""
    main = project(tmp_path / "one")
    copied = shutil.copytree(main.parent, tmp_path / "two") / "renamed.py"
    (copied.parent / main.name).rename(copied)
    (tmp_path / "a.pt2").write_bytes(b"program")
    (tmp_path / "b.pt2").write_bytes(b"program")
    for first, second in [
        (f"python:{main}:make", f"python:{copied}:make"),
        (f"exported:{tmp_path}/a.pt2", f"exported:{tmp_path}/b.pt2"),
    ]:
        parts, other = identity(ModelSpec(source=first)), identity(ModelSpec(source=second))
        assert parts != other
        assert schedule_key(parts) == schedule_key(other)
        assert differences(parts, other) == ()
    before = identity(ModelSpec(source=f"python:{copied}:make"))
    copied.write_text(copied.read_text() + "\n")
    after = identity(ModelSpec(source=f"python:{copied}:make"))
    assert schedule_key(before) != schedule_key(after)
    (found,) = differences(after, identity(ModelSpec(source=f"python:{main}:make")))
    assert found.part == "model.file:renamed.py"


def test_a_model_file_and_its_neighbour_that_change_names_are_another_model() -> None:
    """The key holds which of two files is the model's own."""
    one = {"model.source": "python:a.py:make", "model.file:a.py": "1", "model.file:b.py": "2"}
    two = {"model.source": "python:b.py:make", "model.file:a.py": "1", "model.file:b.py": "2"}
    assert schedule_key(one) != schedule_key(two)
    assert [d.part for d in differences(one, two)] == ["model.source"]


@given(what=st.sampled_from(sorted(MATTERS)), names=st.lists(st.sampled_from(sorted(COSMETIC)), unique=True))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_may_matter_changes_the_key(base: dict[str, Any], what: str, names: list[str]) -> None:
    """Beside any number of changes that cannot matter; and the parts that differ are the ones that say so."""
    change, expected = MATTERS[what]
    spec = copy.deepcopy(base)
    for name in sorted(set(names) - _CLASHES.get(what, set())):
        COSMETIC[name](spec)
    change(spec)
    found, before = parts_of(spec), parts_of(base)
    assert {name for name in before if found[name] != before[name]} == expected
    assert schedule_key(found) != schedule_key(before)


@given(file=st.sampled_from(sorted(FILES)), data=st.data())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_of_every_local_file_matters(base: dict[str, Any], file: str, data: st.DataObject) -> None:
    """One byte changed, taken away or added, in the model's file or any module that it imports; the part names it."""
    path = Path(base["model"]["source"].split(":")[1]).parent / file
    text = FILES[file].encode()
    at = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != text[at]))
    edit = data.draw(st.sampled_from(["change", "remove", "add"]))
    before = parts_of(base)
    try:
        path.write_bytes(text[:at] + (b"" if edit == "remove" else bytes([byte])) + text[at + (edit != "add") :])
        found = parts_of(base)
    finally:
        path.write_bytes(text)
    name = f"model.file:{file}"
    assert found[name] != before[name]
    assert schedule_key(found) != schedule_key(before)
    assert parts_of(base) == before


def test_a_limit_of_memory_matters(base: dict[str, Any]) -> None:
    """A schedule that was found under a limit is no other worker's."""
    keys = {schedule_key(parts_of(base, limit)) for limit in (None, 10**9, 2 * 10**9)}
    assert len(keys) == 3


def test_parts_and_keys_are_one_to_one() -> None:
    """Neither the order of the parts nor text that runs from one into the next gives two the same key."""
    assert schedule_key({"a": "1", "b": "2"}) == schedule_key({"b": "2", "a": "1"})
    texts = [{"a": '1","b":"2'}, {"a": "1", "b": "2"}, {"a": "1b", "": "2"}, {"a": "", "1b": "2"}]
    assert len({schedule_key(parts) for parts in texts}) == len(texts)


def test_the_format_and_the_packages_matter(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own format; the version of the package that builds the model."""
    keys = [schedule_key(parts_of(base))]
    monkeypatch.setattr(request_module, "FORMAT_VERSION", 1_000)
    keys.append(schedule_key(parts_of(base)))
    spec = base | {"model": {"source": "torchvision:resnet18"}}
    keys.append(schedule_key(parts_of(spec | {"model": {"source": "torchvision:resnet18", "weights": "DEFAULT"}})))
    keys.append(schedule_key(parts_of(spec)))
    monkeypatch.setattr(steady, "_first_seen", {})  # as in a new process
    monkeypatch.setattr(machine, "installed_version", lambda _name: "9.9")
    keys.append(schedule_key(parts_of(spec)))
    assert len(set(keys)) == len(keys)


def test_the_words_of_one_input_are_what_stores_hold(base: dict[str, Any]) -> None:
    """A stored schedule of a model with one input is found by these parts; others would miss it."""
    parts = parts_of(base)
    assert {name: said for name, said in parts.items() if name.startswith("input")} == {
        "input": "x:float32[4, 3, 8, 8]",
        "input.memory_format": "contiguous",
    }
