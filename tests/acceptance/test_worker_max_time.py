"""Workers that end at a known time. The processes are real, the jobs are fakes.

Where a test waits for a job first, it sends the timer's signal itself: when a job starts depends on the machine.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from worker_fakes import submit
from worker_processes import Start, ended, noted

from nimble_jobs import client
from nimble_jobs.job import JobState
from nimble_jobs.store import Store
from tests import prefork
from tests.waiting import PATIENCE_S, until


def test_jobs_go_back_when_the_time_is_over(store: Store, start: Start, tmp_path: Path) -> None:
    """Both devices stop at the end of a shard, jobs are queued, exit code 0; the next worker keeps what was done."""
    jobs = [
        submit(
            store,
            tmp_path,
            name=n,
            do="batches",
            count=3,
            gate=str(tmp_path / "gate"),
            path=str(tmp_path / f"{n}-out"),
        )
        for n in ("a", "b")
    ]
    worker = start(device="cpu,cpu", idle=60, limit=600)
    until(lambda: noted(tmp_path, "a") and noted(tmp_path, "b"))
    worker.send_signal(signal.SIGALRM)
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert "its time is over; at the end of their shards: " in (tmp_path / "worker-0.log").read_text()
    for job in jobs:
        assert store.jobs.get(job.id).state is JobState.QUEUED
        assert [a.outcome for a in store.jobs.attempts(job.id)] == ["requeued"]
    assert noted(tmp_path, "a")[-1][2].startswith("stop ")
    (tmp_path / "gate").touch()
    start()
    assert [job.state for job in ended(store, *jobs)] == [JobState.SUCCEEDED] * 2


def test_a_worker_without_a_job_just_ends(store: Store, start: Start) -> None:
    """In time, and long before it would have been idle for too long."""
    began = time.monotonic()
    worker = start(idle=60, limit=2)
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert time.monotonic() - began >= 2
    assert store.workers.live() == []


def test_a_signal_after_the_time_is_the_first_one(store: Store, start: Start, tmp_path: Path) -> None:
    """A batch system that sends SIGTERM while the worker drains does not cut the shard short; a second one does."""
    job = submit(store, tmp_path, do="hang")
    worker = start(limit=600, grace=600)
    until(lambda: noted(tmp_path))
    worker.send_signal(signal.SIGALRM)
    until(lambda: "its time is over" in (tmp_path / "worker-0.log").read_text())
    worker.terminate()
    time.sleep(1)
    assert worker.poll() is None
    worker.terminate()
    with suppress(subprocess.TimeoutExpired):
        worker.wait(timeout=20)
    worker.terminate()  # nothing, unless the first two came so close together that they were one
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert store.jobs.get(job.id).state is JobState.QUEUED


def test_a_detached_worker_ends_in_time(store: Store) -> None:
    """The option reaches the process that outlives the command."""
    (info,) = client.start_worker(
        store.home, device="cpu", max_idle_s=60, max_time_s=20
    )  # time to become ready on busy cores
    until(lambda: store.workers.live() == [])
    assert f"worker {info.id} ends" in next((store.home / "logs").glob("worker-*.log")).read_text()


def test_no_timer_is_left_behind() -> None:
    """No late alarm ends a process whose worker ended before. A process of its own, because pytest uses the timer."""
    code = (
        "import signal\n"
        "from nimble_jobs.worker.signals import StopSignals\n"
        "with StopSignals(600.0) as signals:\n"
        "    assert not signals.asked\n"
        "    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0\n"
        "assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)\n"
    )
    assert prefork.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0
