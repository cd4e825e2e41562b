"""What first runs decide by what they have measured, as jobs on an H200 did (docs/measurements/first-runs.md)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nimble_jobs.job import Hit
from nimble_jobs.payback import QUICK_STAKE, Decision, Plan
from nimble_jobs.planner.jobs.prepared import FirstRun, Prepared, Progress
from nimble_jobs.store import Demand
from nimble_jobs.workloads import deciding
from nimble_jobs.workloads.deciding import At, decided

BATCH, FIRST = 32, 32
KERNELS_S = 0.00403  # of ResNet-50 in fp16, launched behind a kernel that spins
AFTER_S = 0.0039  # for a batch of a job that replays them
CALL_S = 0.005  # alone, with nothing else to do


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What is measured between two batches: change it for another model."""
    found = {"kernels_s": KERNELS_S, "call_s": CALL_S}
    monkeypatch.setattr(deciding, "able", lambda _: SimpleNamespace(asynchronous=True))
    monkeypatch.setattr(deciding, "idle_cores", lambda _: 14.0)
    monkeypatch.setattr(deciding, "_device", lambda _: "NVIDIA H200")
    monkeypatch.setattr(deciding, "kernels_and_call_s", lambda *_: (found["kernels_s"], found["call_s"]))
    return found


def decide_at(record: int, left: int, batch_s: float, *, waits: float = 0.05, idle: float = 0.15) -> Decision:
    """What a job decides that nothing is stored for, whose batches take so long. The first one took a third of a second
    more.
    """
    loaded: Any = SimpleNamespace(
        key="k",
        device=torch.device("cuda"),
        schedule=None,
        request=SimpleNamespace(batch_size=BATCH),
    )
    run = FirstRun(parts={}, began=(FIRST, 1 / 3))
    prepared = Prepared(loaded=loaded, hit=Hit.MISS, load_s=0.35, build_s=0.06, progress=Progress.EAGER, first_run=run)
    context: Any = SimpleNamespace(
        store=SimpleNamespace(schedules=SimpleNamespace(builds=lambda _: [])),
        builders=SimpleNamespace(),
        job=SimpleNamespace(foreground=True),
    )
    run_s = 1 / 3 + (record - FIRST) / BATCH * batch_s
    at = At(record=record, done=record, left=left, run_s=run_s, waits=waits, idle=idle)
    return decided(context, prepared, run, at, Demand())


@pytest.mark.parametrize(
    ("record", "left", "batch_s", "call_s"),
    [
        (1_056, 18_944, 0.00946, 0.0050),
        (1_248, 18_752, 0.00803, 0.0055),
        (1_088, 18_912, 0.00924, 0.0111),  # other threads disturbed the call
        (1_536, 28_464, 0.00652, 0.0045),
        (1_280, 98_720, 0.00786, 0.0051),
        (1_536, 18_464, 0.00652, 0.0045),
    ],
)
def test_launches_that_hold_up_the_device(
    measured: dict[str, float], record: int, left: int, batch_s: float, call_s: float
) -> None:
    """Kernels take half of a batch. The job captures them however long a call takes alone, and expects what that
    brings.
    """
    measured["call_s"] = call_s
    found = decide_at(record, left, batch_s)
    assert found.plan is Plan.QUICK
    assert 1.0 < found.cost_s < 1.6
    assert found.saving_s == pytest.approx(left / BATCH * (batch_s - AFTER_S), rel=0.1)


@pytest.mark.parametrize("batch_s", [0.00403, 0.0042])
def test_a_device_that_is_busy(measured: dict[str, float], batch_s: float) -> None:
    """A capture brings nothing where batches take as long as their kernels."""
    for left in (18_944, 98_720):
        assert decide_at(1_536, left, batch_s, idle=0.0).plan is Plan.NOTHING


def test_a_job_that_waits(measured: dict[str, float]) -> None:
    """For its input or for those who write: nothing makes it faster. What the host does between two batches does not
    count as waiting.
    """
    assert decide_at(1_056, 98_720, 0.00946, waits=0.3, idle=0.3).plan is Plan.NOTHING
    assert decide_at(1_056, 98_720, 0.00946, waits=0.05, idle=0.3).plan is Plan.QUICK
    assert decide_at(1_056, 98_720, 0.00946, waits=0.05, idle=0.6).plan is Plan.NOTHING


def test_a_job_that_is_too_short(measured: dict[str, float]) -> None:
    """A capture would save more than it takes, but takes more than a quarter of the job."""
    found = decide_at(1_056, 8_000, 0.00946)
    assert found.plan is Plan.NOTHING
    assert 8_000 / BATCH * (0.00946 - AFTER_S) > 1.1
    assert QUICK_STAKE * (found.eager_s + 1.0) < 1.1
