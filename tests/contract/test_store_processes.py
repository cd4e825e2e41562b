"""The store between real processes: none claims twice, none corrupts it by dying, and a dead one is seen to be dead."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nimble_jobs.job import JobState
from nimble_jobs.store import NewJob, open_store
from nimble_jobs.store.home import resolve
from tests import store_samples as samples

SERVER = multiprocessing.get_context("forkserver")  # it imports the store once, for all processes
SERVER.set_forkserver_preload(["tests.store_samples"])
PATIENCE_S = 60


@pytest.fixture
def home(url: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder. All processes read its database from its configuration: the one that others are forked from
    keeps the environment of the first test.
    """
    monkeypatch.delenv("NIMBLE_JOBS_DB", raising=False)
    with samples.folder_in_memory() as folder:
        home = resolve(folder)
        if url is not None:
            (home / "config.yaml").write_text(f"database: {url}\n")
            (home / "config.yaml").chmod(0o600)
        yield home


def test_no_double_claim(home: Path) -> None:
    """Eight processes claim jobs in and out of groups: each job once, and no group ever runs more than it may."""
    with open_store(home) as store:
        limits = {"g": 1, "h": 3}
        new = [
            NewJob(spec={"run": {"group": {"name": n, "limit": limits[n]} if n else None}}, name="n", kind="score")
            for n in ("g", "h", None, None) * 50
        ]
        ids = [job.id for job in store.jobs.queue_array(new, samples.NOW)[1]]
        go, results = SERVER.Event(), SERVER.Queue()
        processes = [SERVER.Process(target=samples.claim_everything, args=(str(home), go, results)) for _ in range(8)]
        for process in processes:
            process.start()
        go.set()
        answers = [results.get(timeout=PATIENCE_S) for _ in processes]
        for process in processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
            process.close()
        results.close()
        assert sorted(job for mine, _ in answers for job in mine) == sorted(ids)
        assert all(most.get(name, 0) <= limit for _, most in answers for name, limit in limits.items())
        assert all(len(store.jobs.attempts(job)) == 1 for job in ids)


def test_killed_while_writing(home: Path) -> None:
    """SIGKILL in the middle of commits: the database stays sound, and each job is whole and recoverable."""
    random.seed(0)
    with open_store(home) as store:
        for round_ in range(4):
            ready = [SERVER.Event() for _ in range(2)]
            processes = [
                SERVER.Process(target=samples.work_until_killed, args=(str(home), event, 2 * round_ + i))
                for i, event in enumerate(ready)
            ]
            for process in processes:
                process.start()
            for event in ready:
                assert event.wait(PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while len(store.jobs.list()) <= 2 * (round_ + 1) and time.monotonic() < deadline:
                time.sleep(0.01)  # a busy machine lets them write little
            time.sleep(random.uniform(0.05, 0.3))
            for process in processes:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join(PATIENCE_S)
                process.close()
            store.recover(samples.NOW)
            assert store.check() == []
            assert store.workers.live() == []
        jobs = store.jobs.list()
        assert len(jobs) > 8
        assert {job.state for job in jobs} <= {JobState.QUEUED, JobState.SUCCEEDED}
        for job in jobs:
            attempts = store.jobs.attempts(job.id)
            assert len(attempts) == job.attempt
            assert all(attempt.outcome in ("lost", "succeeded") for attempt in attempts)
            assert [a.outcome for a in attempts].count("succeeded") == (job.state == JobState.SUCCEEDED)
            assert bool(job.outputs) == (job.state == JobState.SUCCEEDED)


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_worker_lock(home: Path, end: str) -> None:
    """A worker is alive as long as its process is, whatever the clock says, and its slot is used again."""
    with open_store(home) as store:
        ready, done = SERVER.Queue(), SERVER.Event()
        process = SERVER.Process(target=samples.hold_worker, args=(str(home), ready, done))
        process.start()
        worker = ready.get(timeout=PATIENCE_S)
        assert store.workers.alive(worker)
        (info,) = store.workers.live()
        assert (info.id, info.pid, info.device, info.status) == (worker, process.pid, "cpu", "idle")
        with store.workers.hold({"device": "cpu"}) as second:
            assert second.id.partition("-")[0] != worker.partition("-")[0]
            assert {info.id for info in store.workers.live()} == {worker, second.id}
        if end == "killed":
            process.kill()
        else:
            done.set()
        process.join(PATIENCE_S)
        process.close()
        ready.close()
        assert not store.workers.alive(worker)
        assert store.workers.live() == []
        with store.workers.hold({"device": "cpu"}) as third:
            assert third.id.partition("-")[0] == worker.partition("-")[0], "the slot is used again"
            assert store.workers.alive(third.id)
            assert not store.workers.alive(worker), "but not the name"


def test_recover_by_locks(home: Path) -> None:
    """`recover` takes back the job of a worker whose lock is free, and `check` names it until then."""
    with open_store(home) as store:
        job = samples.submit(store)
        lease = store.workers.hold({"device": "cpu"})
        assert store.jobs.claim(lease.id, device="cpu", now=samples.NOW) is not None
        assert store.recover(samples.NOW) == []
        assert store.check() == []
        lease.release()
        assert [problem for problem in store.check() if job.id in problem]
        assert [found.state for found in store.recover(samples.NOW)] == [JobState.QUEUED]
        assert store.check() == []
