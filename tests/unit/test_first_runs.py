"""Jobs that begin in eager: what they build, when they move, and what they leave to others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.job import Hit, Job, JobState
from nimble_jobs.payback import Decision, Plan
from nimble_jobs.planner import Builders, Request, Siblings
from nimble_jobs.planner.jobs import first_run
from nimble_jobs.planner.jobs.ahead import build_ahead
from nimble_jobs.planner.jobs.background import order_of, request_of_order
from nimble_jobs.planner.jobs.prepared import FirstRun, Prepared, Progress
from nimble_jobs.store import Store, WantedState, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import Station, execute, real_station
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads import deciding, moving
from nimble_jobs.workloads.deciding import At
from tests.store_samples import queued

CPU = torch.device("cpu")
BATCH, BATCHES = 4, 12
PLAIN = "torch.nn.Linear(3, 2)"
COUNTER = """torch.nn.BatchNorm1d(3, momentum=0.5).train()
    module.eval = lambda: module  # keeps its statistics up to date
"""
NOISE = """Noise()
"""
HEAD = """
import torch

class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) + torch.rand(())
"""


class Later(Builders):
    """Stores the schedule when it is asked for the `asks`-th time whether the build still runs; 0: never ends."""

    def __init__(self, store: Store, asks: int) -> None:
        super().__init__(store.home)
        self._store, self._asks, self._asked = store, asks, 0
        self.wanted: dict[str, Request] = {}
        self.said: list[str] = []

    def start(self, key: str, request: Request, device: torch.device, **_: Any) -> None:
        self.wanted[key] = request_of_order(order_of(key, request, device))

    def running(self, key: str) -> bool:
        if key not in self.wanted:
            return False
        self._asked += 1
        if self._asked == self._asks:
            build_ahead(self.wanted[key], device=CPU, store=self._store)
        return not self._asks or self._asked < self._asks

    def alone(self, key: str, *, ends_at_once: bool) -> None:
        self.said.append(f"alone, ends at once: {ends_at_once}")

    def end(self, key: str) -> None:
        self.said.append("ended")


class Failing(Builders):
    """Builds that have ended before anybody asks."""

    def running(self, key: str) -> bool:
        if key in self._started:
            self._started[key].wait()
        return super().running(key)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job ends before it decides, on busy cores too."""
    monkeypatch.setattr(moving, "_DECIDE_S", 1e9)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job decides after its second batch."""
    monkeypatch.setattr(moving, "_DECIDE_S", 0.0)
    monkeypatch.setattr(moving, "_DECIDE_BATCHES", 1)
    monkeypatch.setattr(moving, "_ASK_S", 0.0)
    monkeypatch.setattr(moving, "_move_pays", lambda *_: True)


def decided(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let each job decide for this plan."""
    answer = Decision(plan=plan, later=False, cost_s=1.0, saving_s=2.0, ends_s=3.0, eager_s=4.0, why="because")
    monkeypatch.setattr(deciding, "decide", lambda *_: answer)


def station_of(store: Store, builders: Builders | None) -> Station:
    return replace(real_station(store, "w", "cpu", None), builders=builders)


def run(
    store: Store, folder: Path, station: Station, *, model: str = PLAIN, foreground: bool = True, **schedule: Any
) -> Job:
    """Run a job to its end; its output replaces that of the last one."""
    (folder / "model.py").write_text(f"{HEAD}\ndef make():\n    module = {model}\n    return module\n")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(BATCHES * BATCH, 3)).astype(np.float32))
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{folder}/model.py:make"},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": BATCH},
        "schedule": schedule,
        "output": {"path": str(folder / "out"), "format": "npy", "fields": ["id", "logits"], "if_exists": "replace"},
    }
    job = queued(
        store,
        spec=specs.dump(specs.restore(spec)),
        name="n",
        kind="score",
        foreground=foreground,
        allow_python=[str(folder)],
        now=time.time(),
    )
    if foreground:
        ended = run_inline(store, job.id, station=replace(station, builders=station.builders))
    else:
        claimed = store.jobs.claim("w", device="cpu", now=time.time())
        assert claimed is not None
        execute(claimed, station)
        ended = store.jobs.get(job.id)
    assert ended.state is JobState.SUCCEEDED, ended.error
    return ended


def said(store: Store, job: Job) -> list[str]:
    return [e.message for e in store.jobs.events(job.id) if e.kind in ("schedule", "fallback")]


def output(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(file) for file in sorted((folder / "out").rglob("*logits*.npy"))])


def in_eager(store: Store, folder: Path, model: str = PLAIN) -> np.ndarray:
    run(store, folder, station_of(store, None), model=model, on_miss="eager")
    return output(folder)


@pytest.mark.usefixtures("undecided")
def test_a_small_job_builds_nothing(store: Store, tmp_path: Path) -> None:
    """It runs in eager and says so; the store counts that it did without, and forgets that once it is built."""
    expected = in_eager(store, tmp_path)
    for turn in (1, 2):
        station = station_of(store, Later(store, 0))
        job = run(store, tmp_path, station)
        assert (job.schedule["hit"], job.schedule["runs"], job.schedule["progress"]) == ("miss", "eager", "eager")
        assert "too early to decide on a build" in job.schedule["first_run"]["why"]
        assert (
            "an idle worker will build the schedule; to build it now, run: nimble-jobs cache build SPEC"
            in said(store, job)[-1]
        )
        begun = said(store, job)[0]
        assert "loading took" in begun
        assert "building" not in begun
        assert np.array_equal(output(tmp_path), expected)
        (wanted,) = store.wanted.list()
        assert (wanted.key, wanted.misses, wanted.state) == (job.schedule["key"], turn, WantedState.WAITS)
    assert store.schedules.list() == []
    built = run(store, tmp_path, station, progressive=False)
    assert "s, building " in said(store, built)[0]
    assert store.wanted.list() == []


@pytest.mark.usefixtures("undecided")
def test_a_worker_keeps_the_model(store: Store, tmp_path: Path) -> None:
    """The next job goes on in eager without loading it; the first one after the build has the schedule."""
    station = station_of(store, Later(store, 0))
    first = run(store, tmp_path, station, foreground=False)
    expected = output(tmp_path)
    (kept,) = station.residents._values.values()
    second = run(store, tmp_path, station, foreground=False)
    assert (second.schedule["hit"], second.schedule["runs"]) == ("miss", "eager")
    assert list(station.residents._values.values()) == [kept]
    assert np.array_equal(output(tmp_path), expected)
    (wanted,) = store.wanted.list()
    build_ahead(request_of_order(wanted.request), device=CPU, store=store)
    third = run(store, tmp_path, station, foreground=False)
    assert (third.schedule["key"], third.schedule["hit"], third.schedule["runs"]) == (
        first.schedule["key"],
        "stored",
        "schedule",
    )
    fourth = run(store, tmp_path, station, foreground=False)
    assert fourth.schedule["hit"] == "resident"
    np.testing.assert_allclose(output(tmp_path), expected, rtol=1e-5, atol=1e-6)
    station.close()


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("plan", "progress", "moves"),
    [
        (Plan.NOTHING, "eager", []),
        (Plan.QUICK, "quick", ["quick"]),
        (Plan.BESIDE, "moved", ["stored"]),
        (Plan.QUICK_BESIDE, "moved", ["quick", "stored"]),
        (Plan.WAIT, "moved", ["stored"]),
    ],
)
def test_every_plan(
    plan: Plan, progress: str, moves: list[str], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job does what was decided, says so, and gives what eager gives, record for record."""
    expected = in_eager(store, tmp_path)
    decided(monkeypatch, plan)
    job = run(store, tmp_path, station_of(store, Later(store, 4)))
    np.testing.assert_allclose(output(tmp_path), expected, rtol=1e-5, atol=1e-6)
    first = job.schedule["first_run"]
    assert (job.schedule["hit"], job.schedule["progress"]) == ("miss", progress)
    assert [move["to"] for move in first["moves"]] == moves
    assert (first["plan"], first["cost_s"], first["saving_s"]) == (plan.value, 1.0, 2.0)
    assert first["why"].startswith("from record ")
    assert first["why"].endswith(": because")
    assert all(move["record_s"] > 0 for move in first["moves"])
    assert f"{first['why']}" in said(store, job)[1]
    stored = plan.beside or plan is Plan.WAIT
    assert ([w.key for w in store.wanted.list()] == []) is stored
    assert [e.key for e in store.schedules.list()] == ([job.schedule["key"]] if stored else [])


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("foreground", "done"), [(True, "ended"), (False, "alone, ends at once: True")])
def test_a_job_never_waits_for_the_build_beside(
    foreground: bool, done: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build ends with a `run`; in a worker it goes on, until the next job. It is wanted either way."""
    decided(monkeypatch, Plan.BESIDE)
    builders = Later(store, 0)
    job = run(store, tmp_path, station_of(store, builders), foreground=foreground)
    assert (job.schedule["runs"], job.schedule["progress"], builders.said) == ("eager", "building", [done])
    assert [w.key for w in store.wanted.list()] == [job.schedule["key"]]
    assert "the job ended before its background build" in said(store, job)[-1]


@pytest.mark.usefixtures("quickly")
def test_a_build_that_failed_is_not_tried_again(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next job neither, though it would pay; once it is stored after all, jobs take it."""
    decided(monkeypatch, Plan.BESIDE)
    first = run(store, tmp_path, station_of(store, Failing(store.home, command=("false",))))
    assert "the build in the background produced no better schedule; see the worker's log" in said(store, first)
    (wanted,) = store.wanted.list()
    assert (wanted.state, wanted.why) == (WantedState.FAILED, "the build in the background produced no schedule")
    builders = Later(store, 0)
    second = run(store, tmp_path, station_of(store, builders))
    assert builders.wanted == {}
    assert second.schedule["first_run"]["why"] == "stays in eager: no build is expected to succeed"
    failed = (
        "an earlier build failed: the build in the background produced no schedule; to try "
        "again, run: nimble-jobs cache build SPEC"
    )
    assert said(store, second)[-1].endswith(failed)
    build_ahead(request_of_order(wanted.request), device=CPU, store=store)
    assert run(store, tmp_path, station_of(store, builders)).schedule["hit"] == "stored"


@pytest.mark.usefixtures("quickly")
def test_what_carries_something_stays_in_eager(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move would have to carry it over."""
    expected = in_eager(store, tmp_path, COUNTER)
    decided(monkeypatch, Plan.QUICK)
    job = run(store, tmp_path, station_of(store, Later(store, 1)), model=COUNTER)
    assert np.array_equal(output(tmp_path), expected)
    assert "stays in eager: the model carries 'running_mean' from batch to batch" in said(store, job)
    assert job.schedule["first_run"]["moves"] == []


@pytest.mark.usefixtures("quickly")
def test_random_numbers_go_on_as_they_were(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that draws numbers cannot be captured; trying leaves them as they would have come."""
    torch.manual_seed(0)
    expected = in_eager(store, tmp_path, NOISE)
    decided(monkeypatch, Plan.QUICK)
    torch.manual_seed(0)
    job = run(store, tmp_path, station_of(store, Later(store, 1)), model=NOISE)
    assert np.array_equal(output(tmp_path), expected)
    assert any(text.startswith("stays in eager after") for text in said(store, job))


@pytest.mark.usefixtures("quickly")
def test_a_schedule_that_somebody_else_stores(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that builds nothing takes it all the same."""
    decided(monkeypatch, Plan.NOTHING)
    ready = store.schedules.ready
    asked: list[str] = []

    def stored_soon(key: str) -> bool:
        asked.append(key)
        if len(asked) == 3:
            (wanted,) = store.wanted.list()
            build_ahead(request_of_order(wanted.request), device=CPU, store=store)
        return ready(key)

    monkeypatch.setattr(store.schedules, "ready", stored_soon)
    job = run(store, tmp_path, station_of(store, Later(store, 0)))
    assert (job.schedule["progress"], job.schedule["runs"]) == ("moved", "schedule")


def test_of_siblings_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have its shares of the time of a batch. A model that has none is measured each time."""
    measured: list[Any] = []

    def kernels_and_call_s(loaded: Any) -> tuple[float, float]:
        measured.append(loaded)
        return 0.006, 0.009

    monkeypatch.setattr(first_run, "_kernels_and_call_s", kernels_and_call_s)
    siblings = Siblings()
    first, second, alone = (SimpleNamespace(siblings=one) for one in (siblings, siblings, None))
    assert first_run.kernels_and_call_s(first, 0.012) == (0.006, 0.009)  # type: ignore[arg-type]
    assert first_run.kernels_and_call_s(second, 0.004) == pytest.approx((0.002, 0.003))  # type: ignore[arg-type]
    for _ in range(2):
        assert first_run.kernels_and_call_s(alone, 0.012) == (0.006, 0.009)  # type: ignore[arg-type]
    assert measured == [first, alone, alone]


@pytest.mark.parametrize(("siblings", "busy", "due"), [(True, ["k"], False), (True, [], True), (False, ["k"], True)])
def test_a_bucket_waits_for_the_build_of_another_one(siblings: bool, busy: list[str], due: bool) -> None:
    """Whose choice it may then take over. Jobs of one schedule decide whatever else is built."""
    loaded: Any = SimpleNamespace(
        key="b", siblings=Siblings() if siblings else None, request=SimpleNamespace(batch_size=4)
    )
    run = FirstRun(parts={}, began=(4, 0.1))
    prepared = Prepared(loaded=loaded, hit=Hit.MISS, load_s=0.0, build_s=0.0, progress=Progress.EAGER, first_run=run)
    context: Any = SimpleNamespace(builders=SimpleNamespace(busy=busy))
    at = At(record=40, done=40, left=1000, run_s=2.0)
    assert moving.due(context, prepared, lambda: at) is due
