"""The key of a training step: what can matter changes it, what cannot does not; and nothing is built for it."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nimble_jobs import spec as specs
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.keys.step import check_seed, code_parts, program_key, program_parts, step_parts
from nimble_jobs.planner.lookup.why import differences
from tests.specs import Change, setting

CPU = torch.device("cpu")

LOSSES = (
    "import shared\n\n\ndef absolute(outputs, y):\n    return shared.absolute(outputs, y)\n\n\ndef other(o, y): ...\n"
)
SHARED = "def absolute(outputs, y):\n    return (outputs - y).abs().mean()\n"


def losses(folder: Path) -> Path:
    """A loss of two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shared.py").write_text(SHARED)
    (folder / "losses.py").write_text(LOSSES)
    return folder / "losses.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A spec that sets whatever the changes below change."""
    folder = tmp_path_factory.mktemp("key")
    (folder / "net.py").write_text("def make(): ...\n")
    return {
        "version": 1,
        "name": "base",
        "kind": "finetune",
        "model": {"source": f"python:{folder}/net.py:make"},
        "input": {
            "source": str(folder / "x.npz"),
            "format": "npz",
            "fields": {"x": "x", "label": "y"},
            "batch_size": 4,
        },
        "output": {"path": str(folder / "out")},
        "train": {
            "loss": f"python:{losses(folder / 'one')}:absolute",
            "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
            "freeze": ["stem.*", "norm.weight"],
            "clip_norm": 1.0,
            "accumulate": 2,
        },
        "x": [3, 8, 8],  # a record, as the reader finds it; no field of a spec
        "y": [],
        "x_dtype": "float32",
        "y_dtype": "int64",
    }


def parts_of(spec: dict[str, Any]) -> dict[str, str]:
    """The parts of the key of a spec's step."""
    spec = copy.deepcopy(spec)
    size = spec["input"]["batch_size"]
    x = torch.zeros(size, *spec.pop("x"), dtype=getattr(torch, spec.pop("x_dtype")))
    y = torch.zeros(size, *spec.pop("y"), dtype=getattr(torch, spec.pop("y_dtype")))
    parsed = specs.restore(spec)
    assert parsed.train is not None
    return step_parts(code_parts(parsed.model, parsed.train), parsed.train, parsed.schedule, x, y, CPU)


def moved(spec: dict[str, Any]) -> None:
    """The loss's files in another folder."""
    file = Path(spec["train"]["loss"].split(":")[1])
    spec["train"]["loss"] = f"python:{losses(file.parents[1] / 'two')}:absolute"


def another_function(spec: dict[str, Any]) -> None:
    spec["train"]["loss"] = spec["train"]["loss"].removesuffix("absolute") + "other"


COSMETIC: dict[str, Change] = {
    "name": setting("name", "other"),
    "seed": setting("model.seed", 7),
    "weights": setting("model.weights", "/elsewhere/w.safetensors"),
    "folder of the loss": moved,
    "input": setting("input.source", "/elsewhere/y.npz"),
    "output": setting("output.path", "/elsewhere/out"),
    "learning rate": setting("train.optimizer.lr", 0.3),
    "its schedule": setting("train.lr_schedule", {"name": "cosine", "warmup_steps": 2}),
    "epochs": setting("train.epochs", 9),
    "last batch": setting("train.last_batch", "drop"),
    "order of globs": setting("train.freeze", ["norm.weight", "stem.*"]),
    "augmentation": setting("train.augment", {"crop_padding": 1, "flip": "both"}),
    "resume": setting("train.resume", "never"),
    "checkpoints": setting("train.checkpoint", {"every_steps": 2, "keep_last": 3}),
    "validation": setting("train.validation", {"source": "/elsewhere/v.npz"}),
    "early stopping": setting("train.early_stopping", {"metric": "loss", "patience": 1}),
    "TensorBoard": setting("train.tensorboard", True),
    "defaults spelled out": setting("schedule", {"streams": "auto", "fuse": "auto", "in_flight": 1}),
    "default tolerance": setting("schedule.tolerance", 1e-3),
    "budget": setting("schedule.budget", 60.0),
    "on miss": setting("schedule.on_miss", "eager"),
    "device": setting("run.device", "cpu"),
    "retry": setting("run.retry", {"max_attempts": 1}),
}
MATTERS: dict[str, tuple[Change, set[str]]] = {
    "arguments": (setting("model.args", {"a": 2}), {"model.args"}),
    "fp16": (setting("model.dtype", "fp16"), {"model.dtype", "tolerance"}),
    "bf16": (setting("model.dtype", "bf16"), {"model.dtype", "tolerance"}),
    "batch size": (setting("input.batch_size", 5), {"input"}),
    "shape": (setting("x", [3, 9, 8]), {"input"}),
    "type of records": (setting("x_dtype", "int64"), {"input"}),
    "shape of labels": (setting("y", [2]), {"input"}),
    "type of labels": (setting("y_dtype", "float32"), {"input"}),
    "optimizer": (
        setting("train.optimizer", {"name": "adam", "weight_decay": 0.01}),
        {"train.optimizer"} | {f"train.optimizer.{name}" for name in ("momentum", "nesterov", "betas", "eps")},
    ),
    "momentum": (setting("train.optimizer.momentum", 0.8), {"train.optimizer.momentum"}),
    "nesterov": (setting("train.optimizer.nesterov", True), {"train.optimizer.nesterov"}),
    "weight decay": (setting("train.optimizer.weight_decay", 0.02), {"train.optimizer.weight_decay"}),
    "no decay on norms": (setting("train.optimizer.no_decay_on_norms", True), {"train.optimizer.weight_decay"}),
    "clipping": (setting("train.clip_norm", 2.0), {"train.clip_norm"}),
    "no clipping": (setting("train.clip_norm", None), {"train.clip_norm"}),
    "accumulation": (setting("train.accumulate", 3), {"train.accumulate"}),
    "frozen parameters": (setting("train.freeze", ["stem.*"]), {"train.freeze"}),
    "function of the loss": (another_function, {"train.loss"}),
    "loss": (setting("train.loss", "mse"), {"train.loss", "train.loss.file:losses.py", "train.loss.file:shared.py"}),
    "one stream": (setting("schedule.streams", 1), {"schedule.streams"}),
    "no fusion": (setting("schedule.fuse", "off"), {"schedule.fuse"}),
    "tolerance": (setting("schedule.tolerance", 1e-4), {"tolerance"}),
}
# Both set the same field.
_CLASHES = {
    "fp16": {"default tolerance"},
    "bf16": {"default tolerance"},
    "loss": {"folder of the loss"},
    "function of the loss": {"folder of the loss"},
    "frozen parameters": {"order of globs"},
}


@given(names=st.lists(st.sampled_from(sorted(COSMETIC)), unique=True))
@example(names=sorted(COSMETIC))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_cannot_matter_leaves_the_key_as_it_is(base: dict[str, Any], names: list[str]) -> None:
    """Any of them together: the very same parts."""
    spec = copy.deepcopy(base)
    for name in names:
        COSMETIC[name](spec)
    assert parts_of(spec) == parts_of(base)


@given(names=st.lists(st.sampled_from(sorted(COSMETIC)), unique=True))
@pytest.mark.parametrize("what", sorted(MATTERS))
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_may_matter_changes_the_key(base: dict[str, Any], what: str, names: list[str]) -> None:
    """Beside any number of changes that cannot matter; and the parts that differ are the ones that say so."""
    change, expected = MATTERS[what]
    spec = copy.deepcopy(base)
    for name in sorted(set(names) - _CLASHES.get(what, set())):
        COSMETIC[name](spec)
    change(spec)
    found, before = parts_of(spec), parts_of(base)
    assert {name for name in {*before, *found} if found.get(name) != before.get(name)} == expected
    assert program_key(found, Role.UPDATE) != program_key(before, Role.UPDATE)


@pytest.mark.parametrize(
    "changes", [{"name": "adamw"}, {"name": "adam", "betas": [0.8, 0.99]}, {"name": "adam", "eps": 1e-6}]
)
def test_fields_of_adam_matter(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """The parts that differ are named after them."""
    spec, other = copy.deepcopy(base), copy.deepcopy(base)
    spec["train"]["optimizer"], other["train"]["optimizer"] = {"name": "adam"}, changes
    found, before = parts_of(other), parts_of(spec)
    field = next((f".{name}" for name in changes if name != "name"), "")
    assert {name for name in before if found[name] != before[name]} == {f"train.optimizer{field}"}


def test_label_smoothing_matters(base: dict[str, Any]) -> None:
    """It is an argument of the loss."""
    texts = []
    for smoothing in (0.0, 0.1):
        spec = copy.deepcopy(base)
        spec["train"] |= {"loss": "cross_entropy", "label_smoothing": smoothing}
        texts.append(parts_of(spec)["train.loss"])
    assert texts == ["cross_entropy", "cross_entropy, label smoothing 0.1"]


@pytest.mark.parametrize("file", ["losses.py", "shared.py"])
def test_every_file_of_the_loss_matters(base: dict[str, Any], file: str, tmp_path: Path) -> None:
    """The loss's own, and what it imports from beside it; the part names it."""
    spec = copy.deepcopy(base)
    copied = losses(tmp_path)
    spec["train"]["loss"] = f"python:{copied}:absolute"
    before = parts_of(spec)
    assert before == parts_of(base)
    (tmp_path / file).write_text((tmp_path / file).read_text() + "\n")
    found = parts_of(spec)
    assert [d.part for d in differences(found, before)] == [f"train.loss.file:{file}"]


def test_what_the_file_of_the_loss_is_called_does_not_matter(base: dict[str, Any], tmp_path: Path) -> None:
    """Equal bytes under another name: the same key, and nothing that differs."""
    renamed = shutil.copy(losses(tmp_path), tmp_path / "renamed.py")
    spec = copy.deepcopy(base)
    spec["train"]["loss"] = f"python:{renamed}:absolute"
    found, before = parts_of(spec), parts_of(base)
    assert found != before
    assert program_key(found, Role.UPDATE) == program_key(before, Role.UPDATE)
    assert differences(found, before) == ()


def test_the_two_programs_of_a_step_have_keys_of_their_own(base: dict[str, Any]) -> None:
    """The one that updates names the step: the check's seed follows from it."""
    parts = parts_of(base)
    keys = [program_key(parts, role) for role in (Role.UPDATE, Role.ACCUMULATE)]
    assert keys[0] != keys[1]
    assert (
        differences(program_parts(parts, Role.UPDATE), program_parts(parts, Role.ACCUMULATE))[0].part == "train.program"
    )
    assert check_seed(parts) == int(keys[0][:7], 16)


def test_switches_of_precision_matter(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide which kernels run."""
    before = parts_of(base)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found = parts_of(base)
    assert [d.part for d in differences(found, before)] == ["precision.deterministic"]
