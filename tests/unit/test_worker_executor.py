"""One attempt in this process: how it ends in the store, and what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from nimble_jobs import spec as specs
from nimble_jobs.data import Staging
from nimble_jobs.errors import DataError, DeviceFault, FencedOut, OutOfMemory, UsageError
from nimble_jobs.job import BadKind, Job, JobState
from nimble_jobs.spec.model import OutputSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.database import Database
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import Run, Station, execute, real_station
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.worker.residency import Residents
from nimble_jobs.workloads.context import JobContext, Outcome, Stop, Stopped
from tests.store_samples import queued

Claim = Callable[..., Job]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(resolve(str(tmp_path / "home")))
    yield opened
    opened.close()


@pytest.fixture
def submit(store: Store, tmp_path: Path) -> Claim:
    def begin(*, foreground: bool = False, after: Sequence[str] = (), gpus: str | int = 1) -> Job:
        spec = {
            "version": 1,
            "name": "n",
            "kind": "score",
            "model": {"source": "torchvision:resnet18"},
            "input": {"source": str(tmp_path / "x.npy"), "format": "npy"},
            "output": {"path": str(tmp_path / "out")},
            "run": {"gpus": gpus},
        }
        resolved = specs.dump(specs.restore(spec))
        return queued(
            store,
            spec=resolved,
            name="n",
            kind="score",
            foreground=foreground,
            after=after,
            allow_python=["/models"],
            now=time.time(),
        )

    return begin


@pytest.fixture
def job(store: Store, submit: Claim) -> Job:
    """A job that this test runs."""
    submit()
    claimed = store.jobs.claim("w", device="cpu", now=time.time())
    assert claimed
    return claimed


def test_the_limit_of_memory_reaches_the_workload(store: Store, job: Job) -> None:
    """The user's limit bounds the schedules, the default only what is kept between jobs."""
    seen: list[int | None] = []

    def run(context: JobContext) -> Outcome:
        seen.append(context.memory_bytes)
        return Outcome()

    for limit in (None, 10**9):
        real = real_station(store, "w", "cpu", limit)
        execute(job, replace(real, run=run))
        assert limit is None or real.residents.budget_bytes == limit
    assert seen == [None, 10**9]


def station(store: Store, run: Run) -> Station:
    return Station(store=store, device="cpu", residents=Residents(100), run=run)


def raising(error: BaseException) -> Run:
    def run(_context: JobContext) -> Outcome:
        raise error

    return run


@pytest.mark.parametrize("error", [DataError("too many are bad"), Stopped(), DeviceFault("gone")])
def test_the_last_report_goes_with_any_end(store: Store, job: Job, error: BaseException) -> None:
    """What was reported just before an attempt failed or stopped is kept."""
    kinds = (BadKind(reason="is null", count=3, first="x.csv:7"),)

    def run(context: JobContext) -> Outcome:
        context.report(done=7, bad=3, bad_kinds=kinds)
        raise error

    execute(job, station(store, run), wish=lambda: Stop.DRAIN)
    found = store.jobs.get(job.id)
    assert found.state is not JobState.RUNNING
    assert (found.records_done, found.records_bad) == (7, 3)
    assert store.jobs.attempts(job.id)[0].bad_kinds == kinds


def test_context(store: Store, job: Job) -> None:
    """The workload gets the typed spec, the device, and the folders that the user allowed; its events are kept."""

    def run(context: JobContext) -> Outcome:
        assert (context.spec.name, context.device) == ("n", "cpu")
        assert context.allowed_python == (Path("/models"),)
        assert context.stop() is Stop.GO
        context.event("schedule", "built", {"key": "k"})
        context.report(done=2, total=2)
        return Outcome(outputs={"path": "p"})

    assert execute(job, station(store, run))
    found = store.jobs.get(job.id)
    assert (found.state, found.records_done, found.outputs) == (JobState.SUCCEEDED, 2, {"path": "p"})
    (event,) = [e for e in store.jobs.events(job.id) if e.kind == "schedule"]
    assert (event.message, event.attempt, event.data) == ("built", 1, {"key": "k"})
    assert "schedule: built" in (store.home / "logs" / f"{job.id}.log").read_text()


@pytest.mark.parametrize(
    ("stop", "state"),
    [
        (Stop.DRAIN, JobState.QUEUED),
        (Stop.CANCEL, JobState.CANCELLED),
        (Stop.TIMEOUT, JobState.FAILED),
    ],
)
def test_stops(store: Store, job: Job, stop: Stop, state: JobState) -> None:
    """Each way to stop has its end."""
    assert execute(job, station(store, lambda _: Outcome(stop=stop)))
    assert store.jobs.get(job.id).state is state


def test_out_of_memory_empties_the_device(store: Store, job: Job) -> None:
    """After an out-of-memory error everything resident goes, and the job is tried again."""

    class Thing:
        bytes = 10
        key = "k"
        closed = False

        def close(self) -> None:
            self.closed = True

    thing = Thing()

    def run(context: JobContext) -> Outcome:
        context.residents.put("k", thing)
        raise OutOfMemory

    assert execute(job, station(store, run))
    assert thing.closed
    assert store.jobs.get(job.id).state is JobState.QUEUED


def test_a_device_fault_is_told_to_the_caller(store: Store, job: Job) -> None:
    """The caller learns that this process must end; the job is tried again."""
    assert not execute(job, station(store, raising(DeviceFault("device-side assert"))))
    assert store.jobs.get(job.id).state is JobState.QUEUED


def test_a_fenced_attempt_changes_nothing(store: Store, job: Job) -> None:
    """Another attempt owns the job: what this one did is dropped without a failure."""

    def run(context: JobContext) -> Outcome:
        store.jobs.fail(job.id, job.attempt, error="lost", retry=True, lost=True, now=1.0)
        context.report(phase="publish")
        raise AssertionError("not reached")

    assert execute(job, station(store, run))
    assert store.jobs.get(job.id).state is JobState.QUEUED
    assert execute(job, station(store, raising(FencedOut())))
    assert execute(job, station(store, lambda _: Outcome(outputs={"path": "stale"})))
    assert store.jobs.get(job.id).outputs == {}


def test_a_job_that_was_cancelled_meanwhile_leaves_nothing_behind(store: Store, job: Job, tmp_path: Path) -> None:
    """`cancel --now` ends the job in the store; whoever runs it notices, and removes what it staged."""

    def run(context: JobContext) -> Outcome:
        staging = Staging(OutputSpec(path=tmp_path / "out"), job.id, job.attempt, ledger=store.publications)
        staging.write_shard(0, {"id": ["0"]})
        store.jobs.cancelled(job.id, job.attempt, now=1.0)
        context.report(phase="publish")
        raise AssertionError("not reached")

    assert execute(job, station(store, run))
    assert store.jobs.get(job.id).state is JobState.CANCELLED
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("inline", [True, False])
def test_a_folder_that_vanishes_fails_the_job(store: Store, submit: Claim, tmp_path: Path, inline: bool) -> None:
    """No other attempt took over, so somebody else removed what was staged: the job ends, and says so."""

    def run(context: JobContext) -> Outcome:
        output = OutputSpec(path=tmp_path / "outputs" / "out")
        staging = Staging(output, context.job.id, context.job.attempt, ledger=store.publications)
        shutil.rmtree(tmp_path / "outputs")
        staging.write_shard(0, {"id": ["0"]})
        raise AssertionError("not reached")

    job = submit(foreground=inline)
    if inline:
        run_inline(store, job.id, station=station(store, run))
    else:
        claimed = store.jobs.claim("w", device="cpu", now=1.0)
        assert claimed is not None
        assert execute(claimed, station(store, run))
    ended = store.jobs.get(job.id)
    staged = tmp_path / "outputs" / f".out.{job.id}" / "attempt-1"
    assert (ended.state, ended.error) == (JobState.FAILED, f"{staged} was removed while this attempt wrote to it")


def test_a_full_disk_is_waited_out(store: Store, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an attempt is written as soon as the store takes it."""
    real, tries = Database._write, []

    def write(database: Database, work: Callable[[Session], object], *, beside: bool) -> object:
        tries.append(1)
        if len(tries) < 4:
            raise OperationalError("", {}, full_disk())
        return real(database, work, beside=beside)

    monkeypatch.setattr(Database, "_write", write)
    assert execute(job, station(store, lambda _: Outcome()))
    assert len(tries) >= 4
    assert store.jobs.get(job.id).state is JobState.SUCCEEDED


def full_disk() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def test_inline(store: Store, submit: Claim) -> None:
    """`run` claims its own job, runs it here and lets go of its lock."""
    job = submit(foreground=True)
    seen = []

    def run(context: JobContext) -> Outcome:
        seen.extend(info.info["role"] for info in store.workers.live())
        return Outcome()

    assert run_inline(store, job.id, station=station(store, run)).state is JobState.SUCCEEDED
    assert seen == ["run"]
    assert store.workers.live() == []
    with pytest.raises(UsageError, match=job.id):
        run_inline(store, job.id, station=station(store, run))


def test_inline_says_that_a_worker_has_its_gpu(store: Store, submit: Claim) -> None:
    """Both share memory and time. Workers of other GPUs do not matter, and cores of a CPU are shared anyway."""
    job, other = submit(foreground=True), submit(foreground=True)
    at_gpu = replace(station(store, lambda _: Outcome()), device="cuda:0")
    with (
        store.workers.hold({"role": "worker", "device": "cuda:0"}) as worker,
        store.workers.hold({"role": "worker", "device": "cuda:1"}),
        store.workers.hold({"role": "worker", "device": "cpu"}),
    ):
        run_inline(store, job.id, station=at_gpu)
        run_inline(store, other.id, station=station(store, lambda _: Outcome()))
    (said,) = [event.message for event in store.jobs.events() if event.kind == "beside"]
    assert said.startswith(f"worker {worker.id} has cuda:0 too: both share its memory and its time")


@pytest.mark.parametrize("gpus", ["all", 3])
def test_inline_says_that_it_uses_one_device(store: Store, submit: Claim, gpus: str | int) -> None:
    """Other devices are for workers. A job that asks for one hears nothing."""
    several = submit(foreground=True, gpus=gpus)
    assert run_inline(store, several.id, station=station(store, lambda _: Outcome())).state is JobState.SUCCEEDED
    run_inline(store, submit(foreground=True).id, station=station(store, lambda _: Outcome()))
    (said,) = [event for event in store.jobs.events() if event.kind == "alone"]
    assert said.job_id == several.id
    assert said.message.startswith(f"run.gpus: found {gpus}, but `nimble-jobs run` scores on one device, cpu; to use")


def test_inline_does_not_wait_for_other_jobs(store: Store, submit: Claim) -> None:
    """A job in run.after that has not ended: refused and cancelled, for nobody else would run it. A bad end, too."""
    parent = submit()
    child = submit(foreground=True, after=[parent.id])
    with pytest.raises(UsageError, match=rf"^run.after: n {parent.id} is queued; wait, or use submit"):
        run_inline(store, child.id)
    assert store.jobs.get(child.id).state is JobState.CANCELLED
    store.jobs.cancel(parent.id, time.time())
    ended = run_inline(store, submit(foreground=True, after=[parent.id]).id)
    assert ended.state is JobState.CANCELLED
    assert parent.id in str(ended.error)


def test_inline_failures_are_final(store: Store, submit: Claim) -> None:
    """Whoever waits at the terminal hears at once, even of errors that a worker would try again."""
    job = submit(foreground=True)
    ended = run_inline(store, job.id, station=station(store, raising(OutOfMemory("no room"))))
    assert (ended.state, ended.error) == (JobState.FAILED, "no room")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_inline_interrupt(store: Store, submit: Claim, number: signal.Signals) -> None:
    """Ctrl-C cancels the job at its next batch."""
    job = submit(foreground=True)
    before = signal.getsignal(number)

    def run(context: JobContext) -> Outcome:
        os.kill(os.getpid(), number)
        return Outcome(stop=context.stop())

    assert run_inline(store, job.id, station=station(store, run)).state is JobState.CANCELLED
    assert signal.getsignal(number) == before


def test_inline_second_interrupt(store: Store, submit: Claim) -> None:
    """A second Ctrl-C does not wait for a batch."""
    job = submit(foreground=True)

    def run(_context: JobContext) -> Outcome:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    assert run_inline(store, job.id, station=station(store, run)).state is JobState.CANCELLED
