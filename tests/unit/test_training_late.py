"""Figures that come late, as from a GPU: nothing waits for them, and nothing is lost, mistaken or kept too early."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from nimble_jobs.errors import JobFailed
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training import attempt
from nimble_jobs.workloads.training.batches.epochs import Sampler
from nimble_jobs.workloads.training.gauge import figures
from nimble_jobs.workloads.training.gauge.figures import Batch, Gauge, Measured, Steps
from nimble_jobs.workloads.training.keep import checkpoint
from tests.trainings import RECORDS, Attempt, digests, lay_out, spec_of

CPU = torch.device("cpu")


class Late(figures._Block):
    """Arrives when it is waited for, or at the third question."""

    asked = 0

    def arrived(self, *, wait: bool) -> bool:
        self.asked = 0 if wait else self.asked + 1
        return wait or self.asked % 3 == 0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Figures leave five batches at a time and arrive a few steps later."""
    monkeypatch.setattr(figures, "_Block", Late)
    monkeypatch.setattr(attempt, "Gauge", partial(Gauge, rows=5))
    return


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    return found


class Step:
    """A step whose figures are its number."""

    grad_norm = None

    def __init__(self) -> None:
        self.loss, self.correct, self.found_inf = torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.zeros(())


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_each_figure_comes_once_and_in_order(rows: int, late: None) -> None:
    """Each figure comes once and in order, however late, hurried or waited for."""
    step, seen, expected = Step(), list[Measured](), 0
    gauge = Gauge(step, CPU, rows=rows)  # type: ignore[arg-type]
    for number in range(1, 101):
        step.loss.fill_(number)
        seen += gauge.take(Batch(step=number, epoch=1, records=8, lr=0.1, last=True))
        if number % 17 == 0:
            seen += gauge.hurry()
        if number % 40 == 0:
            seen += gauge.rest()
            expected = number
        assert expected <= len(seen) <= number
    seen += gauge.rest()
    assert [m.loss for m in seen] == [m.batch.step for m in seen] == list(range(1, 101))


def test_the_same_training(folder: Path, late: None) -> None:
    """Late figures change no published byte, whether the training is stopped or not."""
    spec = spec_of(folder, output="late/net", schedule__on_miss="eager")
    Attempt(spec).run()
    expected = digests(spec.output.path)
    for number in (2, 6, 9):
        again = spec_of(folder, output=f"late-{number}/net", schedule__on_miss="eager")
        Attempt(again, stop=lambda asked, number=number: Stop.DRAIN if asked >= number else Stop.GO).run()  # type: ignore[misc]
        second = Attempt(again, number=2)
        second.run()
        assert "not bit for bit" not in second.said("resumed")[0]
        assert digests(again.output.path) == expected


def test_a_loss_that_is_not_finite(folder: Path, late: None) -> None:
    """The job names the step that failed and keeps an earlier checkpoint, though later steps ran."""
    with np.load(folder / "train.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"].copy()
    labels[Sampler(RECORDS, 8, seed=0).order(1)[8 * 6 - 8]] = 4
    np.savez(folder / "broken.npz", images=images, labels=labels)
    spec = spec_of(
        folder,
        output="nan/net",
        input__source=str(folder / "broken.npz"),
        schedule__on_miss="eager",
        train__loss=f"python:{folder}/model.py:breaks",
        train__checkpoint={"every_steps": 1},
    )
    with pytest.raises(JobFailed, match="the loss became nan at step 6; expected a finite number") as caught:
        Attempt(spec).run()
    kept = [checkpoint.read(path).step for path in sorted(spec.output.path.parent.glob(".net.training/*/step-*"))]
    assert kept
    assert kept[-1] < 6
    assert f"the checkpoint after step {kept[-1]} is kept" in str(caught.value)


def test_sums_of_an_epoch_are_those_of_its_rows() -> None:
    """The sums of the newest epoch have the same bits whether its rows came one by one or from a checkpoint."""
    rng = np.random.default_rng(0)
    steps = Steps()
    for number, epoch in enumerate([1] * 30 + [2] * 41, start=1):
        batch = Batch(step=number, epoch=epoch, records=int(rng.integers(1, 9)), lr=0.1, last=True)
        loss = float(rng.normal())
        steps.add(Measured(batch=batch, loss=loss, correct=1, skipped=False, grad_norm=None))
    rows = [row for row in steps.rows() if row["epoch"] == 2]
    records = sum(row["records"] for row in rows)
    loss, accuracy, seen = steps.of_epoch(2)
    assert (accuracy, seen) == (41 / records, records)
    assert math.isclose(loss, math.fsum(row["loss"] * row["records"] for row in rows) / records)
    assert Steps(steps.tensors(len(steps))).of_epoch(2) == steps.of_epoch(2)
    assert steps.of_epoch(3) == (0.0, 0.0, 0)
    assert len(Steps(steps.tensors(50))) == 50
