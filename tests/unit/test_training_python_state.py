"""What model and loss keep in Python: trial calls leave it alone, and a resume does not claim to be exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.batches.epochs import Sampler
from tests.trainings import Attempt, lay_out, metrics, spec_of

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
from torch import nn

import helper

STEPS = [0]
TABLE = [0] * 5000
LAST = float("nan")
SEEN = {}


class Net(nn.Module):
    def __init__(self, counts=False, cache=False):
        super().__init__()
        torch.manual_seed(3)
        self.counts, self.cache, self.calls, self.mean = counts, cache, 0, torch.zeros(())
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    def forward(self, x):
        if self.counts and self.training:
            self.calls += 1
            self.mean = 0.5 * self.mean + x.mean()
        if self.cache:
            self.table = torch.ones(4)
            self.cache = False
            self.size = 4
        return self.net(x) * (1 + min(self.calls, 10) / 10)


def steady():
    return Net()


def counts():
    return Net(counts=True)


def caches():
    return Net(cache=True)


def counting(outputs, y):
    STEPS[0] += 1
    SEEN["last"] = int(y[0])
    return nn.functional.cross_entropy(outputs, y) * min(1.0, STEPS[0] / 10)


class Warming:
    def __init__(self):
        self.steps = 0

    def __call__(self, outputs, y):
        self.steps += 1
        return nn.functional.cross_entropy(outputs, y) * min(1.0, self.steps / 10)


warming = Warming()


def helped(outputs, y):
    return nn.functional.cross_entropy(outputs, y) * min(1.0, helper.step() / 10)


def unknown(outputs, y):
    global LAST
    LAST = float("nan")
    return nn.functional.cross_entropy(outputs, y)


def tabled(outputs, y):
    TABLE[0] += 1
    return nn.functional.cross_entropy(outputs, y) * min(1.0, TABLE[0] / 10)
"""
HELPER = """
STEPS = 0


def step():
    global STEPS
    STEPS += 1
    return STEPS
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    (found / "state.py").write_text(MODEL)
    (found / "helper.py").write_text(HELPER)
    return found


def interrupted(folder: Path, name: str, on_miss: str, model: str, loss: str) -> dict[str, object]:
    """What the second attempt says about where it goes on."""
    spec = spec_of(
        folder,
        output=f"{name}/net",
        schedule__on_miss=on_miss,
        model__source=f"python:{folder}/state.py:{model}",
        train__loss=loss if loss == "cross_entropy" else f"python:{folder}/state.py:{loss}",
    )
    assert Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= 3 else Stop.GO).run().stop is Stop.DRAIN
    second = Attempt(spec, number=2)
    second.run()
    (found,) = [event for event in second.events if event[0] == "resumed"]
    return {"said": found[1].partition("; ")[2], **found[2]}


@pytest.mark.parametrize("on_miss", ["eager", "build"])
@pytest.mark.parametrize(
    ("model", "loss", "names"),
    [
        ("counts", "cross_entropy", "calls, mean"),
        ("steady", "counting", "STEPS of train.loss"),
        ("steady", "warming", "train.loss"),
        ("steady", "helped", "helper.STEPS of train.loss"),
        ("steady", "tabled", "TABLE of train.loss"),
    ],
)
def test_a_resume_is_not_exact(folder: Path, on_miss: str, model: str, loss: str, names: str) -> None:
    """The event names what no checkpoint holds."""
    found = interrupted(folder, f"{model}-{loss}-{on_miss}", on_miss, model, loss)
    assert found["exact"] is False
    assert found["said"] == (
        "not bit for bit like an uninterrupted training: "
        f"each step changes {names} in Python, which no checkpoint holds"
    )


@pytest.mark.parametrize("model", ["steady", "caches"])
def test_what_the_first_call_caches_does_not_matter(folder: Path, model: str) -> None:
    """A resume is exact then."""
    found = interrupted(folder, f"{model}-exact", "eager", model, "cross_entropy")
    assert (found["exact"], found["said"]) == (True, "")


def test_nan_that_stays_nan_is_no_change(folder: Path) -> None:
    """Although no NaN equals another."""
    found = interrupted(folder, "unknown", "eager", "steady", "unknown")
    assert (found["exact"], found["said"]) == (True, "")


@pytest.mark.parametrize("on_miss", ["eager", "build"])
@pytest.mark.parametrize("loss", ["counting", "warming", "helped", "tabled"])
def test_a_loss_begins_as_its_file_says(folder: Path, loss: str, on_miss: str) -> None:
    """The calls before the first step do not count, and what changes in each step is not recorded as it was once."""
    spec = spec_of(
        folder,
        output=f"first-{loss}-{on_miss}/net",
        schedule__on_miss=on_miss,
        model__source=f"python:{folder}/state.py:steady",
        train__loss=f"python:{folder}/state.py:{loss}",
        train__augment={},
        train__epochs=1,
        train__optimizer={"name": "sgd", "lr": 1e-12},
        train__lr_schedule={"name": "constant"},
    )
    Attempt(spec).run()
    with np.load(folder / "train.npz") as arrays:
        x, y = torch.from_numpy(arrays["images"] / np.float32(255)), torch.from_numpy(arrays["labels"])
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    order = Sampler(len(y), 8, seed=0).order(1)
    batches = [order[i : i + 8] for i in range(0, len(order), 8)]
    with torch.no_grad():
        expected = [float(nn.functional.cross_entropy(net(x[b]), y[b])) * (i + 1) / 10 for i, b in enumerate(batches)]
    assert [line["loss"] for line in metrics(spec.output.path, "step")] == pytest.approx(expected, rel=1e-4)
