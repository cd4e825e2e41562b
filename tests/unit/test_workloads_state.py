"""Scoring with models that carry something from batch to batch: a job's results do not tell what ran before it, nor
whether it was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.job import Job, JobState
from nimble_jobs.planner.jobs.replay import replay
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import Station, execute, real_station
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.scoring import Scoring
from tests.store_samples import queued
from tests.unit.test_workloads_progressive import Slow

SHARDS, SHARD, BATCH = 4, 8, 4
HEAD = """
import numpy as np
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        nn.init.constant_(self.linear.weight, 0.25)
        nn.init.constant_(self.linear.bias, 0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.kept = torch.zeros(2)
        self.calls = 0
        self.seen = []
        self.array = np.zeros(1)

    def forward(self, x):
"""
BODIES = {
    "a counter in a buffer": """
        self.count += 1
        return self.linear(x) * self.count
""",
    "a moving average": """
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x - self.mean)
""",
    "a plain tensor": """
        y = self.linear(x) + self.kept
        self.kept.copy_(y.mean(0))
        return y
""",
    "a weight": """
        with torch.no_grad():
            self.linear.weight.mul_(1.01)
        return self.linear(x)
""",
    "a number": """
        self.calls += 1
        return self.linear(x) * self.calls
""",
    "a list": """
        self.seen.append(x.mean())
        return self.linear(x) + torch.stack(self.seen).sum()
""",
    "an array": """
        self.array[0] += float(x.mean())
        return self.linear(x) + float(self.array[0])
""",
    "a weight's data": """
        self.linear.bias.data.add_(float(x.max()))
        return self.linear(x)
""",
}
NOTHING = """
        return self.linear(x)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def submit(store: Store, folder: Path, body: str, *, progressive: bool = False) -> Job:
    """A job of several shards of two batches each."""
    (folder / "model.py").write_text(f"{HEAD}{body}\ndef make():\n    return Model()\n")
    np.save(folder / "x.npy", records())
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{folder}/model.py:make"},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": BATCH},
        "schedule": {"progressive": progressive},
        "output": {
            "path": str(folder / "out"),
            "format": "npy",
            "fields": ["id", "logits"],
            "if_exists": "replace",
            "shard_size": SHARD,
        },
    }
    return queued(
        store,
        spec=specs.dump(specs.restore(spec)),
        name="n",
        kind="score",
        foreground=True,
        allow_python=[str(folder)],
        now=time.time(),
    )


def records() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(SHARDS * SHARD, 3)).astype(np.float32)


def done(store: Store, folder: Path, job: Job, station: Station) -> tuple[Job, np.ndarray]:
    """Run the job to its end: how it ended, and what it wrote."""
    ended = run_inline(store, job.id, station=station)
    assert ended.state is JobState.SUCCEEDED, ended.error
    return ended, output(folder)


def output(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(file) for file in sorted((folder / "out").rglob("*logits*.npy"))])


def in_eager(folder: Path) -> np.ndarray:
    """What a module gives that is called with each batch in turn."""
    names: dict[str, Any] = {}
    exec(compile((folder / "model.py").read_text(), "model.py", "exec"), names)
    module = names["make"]().eval()
    with torch.no_grad():
        batches = torch.from_numpy(records()).split(BATCH)
        return np.concatenate([module(batch).numpy() for batch in batches])


def interrupted(monkeypatch: pytest.MonkeyPatch, store: Store, job: Job, shards: int) -> None:
    """Let a worker take the job and leave after so many shards."""
    written = []
    whole = Scoring._counted

    def counted(self: Scoring, landed: Any, lane: Any) -> Any:
        written.extend([1] * landed.beside.at.last)
        return whole(self, landed, lane)

    claimed = store.jobs.claim_foreground(job.id, "w", now=time.time())
    assert claimed is not None
    with monkeypatch.context() as patch:
        patch.setattr(Scoring, "_counted", counted)
        execute(claimed, real_station(store, "w", "cpu", None), wish=lambda: drain_after(written, shards))
    assert store.jobs.get(job.id).state is JobState.QUEUED


def drain_after(written: list[int], shards: int) -> Stop:
    return Stop.DRAIN if len(written) >= shards else Stop.GO


@pytest.mark.parametrize("what", BODIES)
def test_results_do_not_tell_what_ran_before(
    what: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undisturbed, once more on what is resident, interrupted and resumed, each from its schedule or in eager: always
    what eager gives. A job that is resumed begins again with its first record, and says why.
    """
    station = replace(real_station(store, "w", "cpu", None), builders=None)
    _, undisturbed = done(store, tmp_path, submit(store, tmp_path, BODIES[what]), station)
    expected = in_eager(tmp_path)
    np.testing.assert_allclose(undisturbed, expected, rtol=1e-5, atol=1e-6)
    _, resident = done(store, tmp_path, submit(store, tmp_path, BODIES[what]), station)
    assert np.array_equal(undisturbed, resident)
    station.residents.clear()
    job = submit(store, tmp_path, BODIES[what])
    interrupted(monkeypatch, store, job, 2)
    resumed, found = done(store, tmp_path, job, station)
    assert np.array_equal(undisturbed, found)
    (event,) = [e.message for e in store.jobs.events(resumed.id) if e.kind == "restart"]
    assert event.startswith("starts again at the first record: the model carries '")
    station.close()


def test_what_carries_nothing_goes_on(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished shards of any other model are taken over."""
    station = replace(real_station(store, "w", "cpu", None), builders=None)
    job = submit(store, tmp_path, NOTHING)
    interrupted(monkeypatch, store, job, 2)
    calls = []
    whole = Scoring._write
    monkeypatch.setattr(Scoring, "_write", lambda *args: calls.append(1) or whole(*args))
    resumed, found = done(store, tmp_path, job, station)
    assert len(calls) == SHARDS - 2
    np.testing.assert_allclose(found, in_eager(tmp_path), rtol=1e-5, atol=1e-6)
    assert not [e for e in store.jobs.events(resumed.id) if e.kind == "restart"]
    station.close()


@pytest.mark.parametrize("what", ["a counter in a buffer", "a plain tensor"])
def test_moving_to_a_better_schedule_keeps_the_state(what: str, store: Store, tmp_path: Path) -> None:
    """The count goes on where a progressive job moves; the next job on what it moved to begins with none."""
    station = replace(real_station(store, "w", "cpu", None), builders=Slow(store, 3))
    moved, found = done(store, tmp_path, submit(store, tmp_path, BODIES[what], progressive=True), station)
    assert moved.schedule["progress"] == "moved"
    np.testing.assert_allclose(found, in_eager(tmp_path), rtol=1e-5, atol=1e-6)
    after, again = done(store, tmp_path, submit(store, tmp_path, BODIES[what], progressive=True), station)
    assert after.schedule["hit"] == "resident"
    np.testing.assert_allclose(again, in_eager(tmp_path), rtol=1e-5, atol=1e-6)
    station.close()


@pytest.mark.parametrize("what", ["a counter in a buffer", "a moving average", "a plain tensor"])
def test_a_stored_schedule_is_verified_from_the_same_state(what: str, store: Store, tmp_path: Path) -> None:
    """`cache verify --replay` compares what both do from the state of a fresh module."""
    station = replace(real_station(store, "w", "cpu", None), builders=None)
    done(store, tmp_path, submit(store, tmp_path, BODIES[what]), station)
    (entry,) = store.schedules.list()
    device = torch.device("cpu")
    found = replay(entry, device=device, store=store, folders=(tmp_path,), allowed_python=(tmp_path,))
    assert found.agrees, found.said
    assert store.schedules.ready(entry.key)
    station.close()
