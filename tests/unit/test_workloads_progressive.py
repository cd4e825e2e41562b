"""Jobs that begin on what is quick to build, and move to the better schedule at a shard's boundary."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs import spec as specs
from nimble_jobs.errors import CheckFailed, OutOfMemory
from nimble_jobs.job import Job, JobState
from nimble_jobs.planner import Builders, Request, key_parts, schedule_key
from nimble_jobs.planner.jobs.ahead import build_ahead
from nimble_jobs.planner.jobs.background import order_of, request_of_order
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Miss, Store, WantedState, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import Station, real_station
from nimble_jobs.worker.foreground import run_inline
from tests import prefork
from tests.store_samples import queued
from tests.waiting import PATIENCE_S

CPU = torch.device("cpu")
SHARDS, SHARD = 6, 4


class Slow(Builders):
    """A build that takes until the `boundaries`-th shard; without them it never gives a schedule."""

    def __init__(self, store: Store, boundaries: int | None) -> None:
        super().__init__(store.home)
        self._store = store
        self._boundaries = boundaries
        self._wanted: dict[str, Request] = {}
        self.asked = 0

    def start(self, key: str, request: Request, device: torch.device) -> None:
        self._wanted[key] = request_of_order(order_of(key, request, device))

    def running(self, key: str) -> bool:
        self.asked += 1
        if self._boundaries is not None and self.asked == self._boundaries:
            build_ahead(self._wanted[key], device=CPU, store=self._store)
        return self._boundaries is not None and self.asked < self._boundaries


class Patient(Builders):
    """Real processes; whoever asks waits until they have ended."""

    def running(self, key: str) -> bool:
        if key in self._started:
            self._started[key].wait(240)
        return super().running(key)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def run(store: Store, folder: Path, builders: Builders | None = None, *, station: Station | None = None) -> Job:
    """Run a job of several shards to its end; its output replaces that of the last one."""
    (folder / "model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(SHARDS * SHARD, 3)).astype(np.float32))
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{folder}/model.py:make"},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": 4},
        "schedule": {"progressive": True},
        "output": {
            "path": str(folder / "out"),
            "format": "npy",
            "fields": ["id", "logits"],
            "if_exists": "replace",
            "shard_size": SHARD,
        },
    }
    job = queued(
        store,
        spec=specs.dump(specs.restore(spec)),
        name="n",
        kind="score",
        foreground=True,
        allow_python=[str(folder)],
        now=time.time(),
    )
    station = station or replace(real_station(store, "w", "cpu", None), builders=builders)
    ended = run_inline(store, job.id, station=station)
    assert ended.state is JobState.SUCCEEDED, ended.error
    return ended


def events(store: Store, job: Job) -> list[str]:
    return [e.message for e in store.jobs.events(job.id) if e.kind in ("schedule", "fallback")]


def output(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(file) for file in sorted((folder / "out").rglob("*logits*.npy"))])


def test_it_moves_at_a_boundary_and_says_so(store: Store, tmp_path: Path) -> None:
    """After two shards the schedule is stored: the third begins with it. The output is what one schedule gives, and
    what the job moved to stays for the next one.
    """
    station = replace(real_station(store, "w", "cpu", None), builders=Slow(store, 3))
    job = run(store, tmp_path, station=station)
    found = output(tmp_path)
    first, second = events(store, job)
    assert first.startswith("miss ")
    assert f"moved to {job.schedule['key'][:12]} before record 8: " in second
    assert second.endswith(f" ms a replay before, {job.schedule['replay_us'] / 1e3:.4g} ms now, measured while it ran")
    assert (job.schedule["hit"], job.schedule["runs"], job.schedule["progress"]) == ("miss", "schedule", "moved")
    after = run(store, tmp_path, station=station)
    assert (after.schedule["hit"], after.schedule["progress"]) == ("resident", None)
    assert np.array_equal(found, output(tmp_path))
    station.close()


def test_a_build_that_gives_nothing_leaves_it_where_it_is(store: Store, tmp_path: Path) -> None:
    """The job ends on what it began with and says so once; nothing of it stays for the next job."""
    station = replace(real_station(store, "w", "cpu", None), builders=Slow(store, None))
    job = run(store, tmp_path, station=station)
    assert (job.schedule["hit"], job.schedule["runs"], job.schedule["progress"]) == ("miss", "schedule", "stays")
    assert events(store, job)[1:] == ["the build in the background produced no better schedule; see the worker's log"]
    assert (station.residents.keys, store.schedules.list()) == ((), [])


def test_a_job_that_is_over_first(store: Store, tmp_path: Path) -> None:
    """It never waits for the build."""
    job = run(store, tmp_path, Slow(store, SHARDS + 1))
    assert (job.schedule["runs"], job.schedule["progress"]) == ("schedule", "building")
    assert len(events(store, job)) == 1


def test_a_schedule_that_cannot_be_used_is_a_visible_fallback(store: Store, tmp_path: Path) -> None:
    """One that was refused meanwhile is none; the job goes on."""

    class Refused(Slow):
        def running(self, key: str) -> bool:
            found = super().running(key)
            if self.asked == 3:
                store.schedules.refuse(key, "it differs", time.time())
            return found

    job = run(store, tmp_path, Refused(store, 3))
    assert (job.schedule["runs"], job.schedule["progress"]) == ("schedule", "stays")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutOfMemory("no room for the better one"), "no room for the better one"),
        (CheckFailed("it differs by 3"), "the stored schedule failed its check: it differs by 3"),
    ],
)
def test_a_better_schedule_that_cannot_be_loaded_costs_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """The job was running well: it goes on with what it began with, on a schedule, and says why."""
    module = sys.modules["nimble_jobs.planner.jobs.take"]

    def unfit(*_: Any, **__: Any) -> None:
        raise error

    class Unfit(Slow):
        def running(self, key: str) -> bool:
            found = super().running(key)
            monkeypatch.setattr(module, "restore", unfit)
            return found

    job = run(store, tmp_path, Unfit(store, 2))
    assert (job.schedule["runs"], job.schedule["progress"], job.schedule["fallback"]) == ("schedule", "stays", None)
    assert events(store, job)[1:] == [f"continues as it began, because the better schedule could not be loaded: {said}"]
    found = output(tmp_path)
    monkeypatch.undo()
    run(store, tmp_path)
    assert np.array_equal(found, output(tmp_path))


def test_it_does_not_move_before_the_builder_has_ended(store: Store, tmp_path: Path) -> None:
    """A builder that has stored the schedule still holds its model on the device until it ends."""

    class Lingers(Slow):
        def running(self, key: str) -> bool:
            super().running(key)
            return self.asked < 5

    job = run(store, tmp_path, Lingers(store, 2))
    assert "before record 16: " in events(store, job)[1]
    assert job.schedule["progress"] == "moved"


def test_a_process_builds_it(store: Store, tmp_path: Path) -> None:
    """A real one: what it stored under the job's key is what the job moves to, at its first boundary."""
    builders = Patient(store.home, command=[*prefork.words(), "-m", "nimble_jobs.planner.jobs.builder"])
    job = run(store, tmp_path, builders)
    assert job.schedule["progress"] == "moved"
    assert "before record 0" in events(store, job)[1]
    assert store.schedules.get(job.schedule["key"]).hits == 1
    assert run(store, tmp_path).schedule["hit"] == "stored"


def order_for(folder: Path, body: str) -> dict[str, Any]:
    (folder / "model.py").write_text(f"import time, torch\nfrom pathlib import Path\ndef make():\n    {body}\n")
    request = Request(
        model=ModelSpec(source=f"python:{folder}/model.py:make"),
        shape=(3,),
        dtype="float32",
        batch_size=2,
        allowed_python=(folder,),
    )
    return order_of(schedule_key(key_parts(request, CPU)), request, CPU) | {"home": str(resolve(str(folder / "home")))}


def builder(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    process = prefork.start([sys.executable, "-m", "nimble_jobs.planner.jobs.builder"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    return process


def test_a_builder_ends_with_its_parent(tmp_path: Path) -> None:
    """However the parent ended, the pipe is closed then; the build is not waited for."""
    marker = tmp_path / "building"
    process = builder(order_for(tmp_path, f"Path({str(marker)!r}).touch(); time.sleep(600)"))
    while not marker.exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 1


def test_a_builder_that_is_set_up_otherwise_builds_nothing(tmp_path: Path) -> None:
    """Its schedule would be another key's; it says so and fails."""
    order = order_for(tmp_path, "return torch.nn.Linear(3, 2)") | {"batch_size": 3}
    process = builder(order)
    assert process.wait(PATIENCE_S) == 1
    assert process.stdin is not None
    process.stdin.close()
    with open_store(Path(order["home"])) as store:
        assert store.schedules.list() == []


def test_a_builder_says_why_there_is_no_schedule(tmp_path: Path) -> None:
    """Those who list what jobs miss see the reason, which stays whatever is said later."""
    order = order_for(tmp_path, "return type('M', (torch.nn.Module,), {'forward': lambda s, x: x * float(x.sum())})()")
    with open_store(Path(order["home"])) as store:
        miss = Miss(
            key=order["key"], model="m", device="d", input="i", request=order, saves_s=1.0, costs_s=1.0, why="w"
        )
        store.wanted.missed(miss, now=1.0)
        assert store.wanted.take("w", "d", alive=lambda _: True, now=1.0) is not None
        process = builder(order)
        assert process.wait(PATIENCE_S) == 1
        assert process.stdin is not None
        process.stdin.close()
        store.wanted.failed(order["key"], "see elsewhere", now=2.0)
        (wanted,) = store.wanted.list()
        assert wanted.state is WantedState.FAILED
        assert wanted.why.startswith("no schedule could be built: ")


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    batch_size=st.integers(1, 99),
    dtype=st.sampled_from(["float32", "uint8", "int64"]),
    embedding=st.booleans(),
    memory_bytes=st.none() | st.integers(1, 2**40),
    streams=st.just("auto") | st.integers(1, 64),
    tolerance=st.none() | st.floats(1e-9, 1.0),
    args=st.dictionaries(
        st.text(max_size=5), st.integers() | st.text(max_size=5) | st.lists(st.booleans()), max_size=3
    ),
)
def test_an_order_loses_nothing(
    shape: tuple[int, ...], streams: Any, tolerance: float | None, args: dict[str, Any], **given_fields: Any
) -> None:
    """Through JSON and back a request is the same, but for being progressive."""
    schedule = ScheduleSpec(streams=streams, tolerance=tolerance, progressive=True)
    model = ModelSpec(source="torchvision:resnet18", args=args, weights="/w.pt", seed=3, dtype="bf16")
    request = Request(model=model, shape=shape, schedule=schedule, allowed_python=(Path("/a"),), **given_fields)
    found = request_of_order(json.loads(json.dumps(order_of("k", request, CPU))))
    assert found == replace(request, schedule=schedule.model_copy(update={"progressive": False}))
