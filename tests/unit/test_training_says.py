"""What a training says about choices that users may not expect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nimble_jobs.data import open_reader
from nimble_jobs.data.stamps import Names, Stamp, Stamps, shared
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.basis import differences
from tests.trainings import Attempt, lay_out, spec_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAN_IF_HELD_OUT = """
from torch import nn


def loss(outputs, y):
    found = nn.functional.cross_entropy(outputs, y)
    return found if found.requires_grad else found * float("nan")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    (found / "nan.py").write_text(NAN_IF_HELD_OUT)
    return found


def test_no_epoch_is_the_best(folder: Path) -> None:
    """The last weights are published, and the job says so."""
    spec = spec_of(
        folder,
        output="nan/net",
        schedule__on_miss="eager",
        train__loss=f"python:{folder}/nan.py:loss",
        train__checkpoint={"best": "val_loss"},
    )
    attempt = Attempt(spec)
    attempt.run()
    assert attempt.said("best") == []
    assert attempt.said("no-best") == [
        "model.safetensors is from the last epoch, because val_loss was not a number in any epoch"
    ]
    other = Attempt(spec_of(folder, output="plain/net", schedule__on_miss="eager", train__epochs=1))
    other.run()
    assert other.said("no-best") == []


def test_a_named_checkpoint_that_is_passed_over(folder: Path) -> None:
    """A later one of the same training is used, and the job names both."""
    changes = {"schedule__on_miss": "eager", "train__checkpoint": {"every_steps": 2, "keep_last": 9}}
    spec = spec_of(folder, output="named/net", **changes)
    Attempt(spec, stop=lambda asked: Stop.CANCEL if asked == 6 else Stop.GO).run()
    first, *_, last = sorted(spec.output.path.parent.glob(".net.training/*/step-*"))
    attempt = Attempt(spec_of(folder, output="named/net", train__resume=str(first), **changes), job="later")
    attempt.run()
    assert attempt.said("passed-over") == [
        f"train.resume: {first} is passed over, because {last} of the same training is later"
    ]
    assert f"from {last} " in attempt.said("resumed")[0]


@pytest.mark.parametrize("source", ["train.npz", "folder"])
def test_held_out_records_that_are_trained_on(folder: Path, source: str) -> None:
    """The job says that files of the validation are in the input, whatever their path."""
    (folder / "folder").mkdir(exist_ok=True)
    link = folder / "folder" / "a.npz"
    link.unlink(missing_ok=True)
    link.symlink_to(folder / "train.npz")
    name = folder / source
    attempt = Attempt(
        spec_of(
            folder,
            output=f"overlap-{source}/net",
            schedule__on_miss="eager",
            train__epochs=1,
            train__validation={"source": str(name)},
        )
    )
    attempt.run()
    assert attempt.said("overlap") == [
        f"train.validation.source: 1 file is also in the input, such as {link if source == 'folder' else name}; "
        "validations measure records that were trained on"
    ]


def test_files_that_two_inputs_share(tmp_path: Path) -> None:
    """Listed or one by one, by size, time and inode; files that cannot be read are nobody's."""
    for name in "abc":
        (tmp_path / name).write_text(name)
    listed = Stamps.of(tmp_path, Names(["a", "b", "c", "gone"]))
    one_by_one = [Stamp.of(tmp_path / "b"), listed[3]]
    assert shared(listed, one_by_one) == [1]
    assert shared(one_by_one, listed) == [0]
    assert shared(listed, []) == []


def test_a_picture_beside_the_folders_of_the_classes(tmp_path: Path) -> None:
    """It is a bad record, and the classes are the folders. Without folders, all are of the top one."""
    root = tmp_path / "class"
    for name in ("cat/1.png", "dog/2.png", "contact-sheet.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(root / name)
    spec = InputSpec(source=str(root), format="images", fields=FieldsSpec(label="parent"))
    with open_reader(spec) as reader:
        batch = reader.take(np.arange(3))
        assert reader.label_names == ("cat", "dog")
    assert batch.ids == ["cat/1.png", "dog/2.png"]
    assert [(bad.id, bad.reason) for bad in batch.bad] == [
        ("contact-sheet.png", "lies beside the folders of the classes; expected it in one of them")
    ]
    with open_reader(spec.model_copy(update={"source": str(root / "cat")})) as reader:
        assert reader.label_names == ("cat",)


def test_differences_are_named_as_in_the_spec() -> None:
    """Fields have the names that users write, and a seed is named once."""
    before = {
        "spec": {"model": {"seed": 0}, "train": {"best": None}},
        "model": {"model.file:helper.py": "a"},
        "weights": "seed:0",
    }
    now = {
        "spec": {"model": {"seed": 1}, "train": {"best": "val_loss"}},
        "model": {"model.file:helper.py": "b"},
        "weights": "seed:1",
    }
    assert differences(before, now) == [
        "model.seed was 0 and is 1 now",
        'train.checkpoint.best was null and is "val_loss" now',
        "the files or versions behind model.file:helper.py changed",
    ]
    assert differences({"weights": "seed:0 a:1"}, {"weights": "seed:1 a:2"}) == [
        "the files or versions behind weights changed"
    ]


AUXILIARY = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.main, self.aux = nn.Flatten(), nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, x):
        x = self.flat(x)
        return {"logits": self.main(x), "aux": self.aux(x)} if self.training else self.main(x)
"""


LAYER_DROP = """
import random

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.main, self.aux = nn.Linear(64, 4), nn.Linear(64, 4)
        self.chance, self.calls = random.Random(0), 0

    def forward(self, x):
        x = x.flatten(1)
        self.calls += 1
        skipped = SKIPPED if self.training else None
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = x + layer(x)
        return {"logits": self.main(x), "aux": self.aux(x)} if self.training else self.main(x)
"""


@pytest.mark.parametrize(
    ("name", "skipped"),
    [("torch", "int(torch.randint(6, ()))"), ("own", "self.chance.randrange(6)"), ("turns", "self.calls % 6")],
)
def test_layers_that_a_step_skips_are_trained(name: str, skipped: str, folder: Path) -> None:
    """Each step skips one; only weights that no trial step trains are named."""
    (folder / f"drop_{name}.py").write_text(LAYER_DROP.replace("SKIPPED", skipped))
    attempt = Attempt(
        spec_of(
            folder,
            output=f"drop-{name}/net",
            schedule__on_miss="eager",
            model__source=f"python:{folder}/drop_{name}.py:Net",
            train__epochs=1,
        )
    )
    attempt.run()
    assert attempt.said("untrained") == [
        "in 8 trial steps the loss did not depend on 2 weights, such as aux.weight; "
        "what gets no gradient is published as it began"
    ]


def test_weights_that_no_step_trains(folder: Path) -> None:
    """The heads that a model has for a loss of several outputs, such as googlenet's, stay as they began."""
    (folder / "auxiliary.py").write_text(AUXILIARY)
    source = f"python:{folder}/auxiliary.py:Net"
    spec = spec_of(folder, output="aux/net", schedule__on_miss="eager", model__source=source, train__epochs=1)
    attempt = Attempt(spec)
    attempt.run()
    assert attempt.said("untrained") == [
        "in 8 trial steps the loss did not depend on 2 weights, such as aux.weight; "
        "what gets no gradient is published as it began"
    ]
    frozen = spec_of(
        folder,
        output="aux-frozen/net",
        schedule__on_miss="eager",
        model__source=source,
        train__epochs=1,
        train__freeze=["aux.*"],
    )
    attempt = Attempt(frozen)
    attempt.run()
    assert attempt.said("untrained") == []
