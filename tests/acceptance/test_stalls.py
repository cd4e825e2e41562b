"""Children that make no progress, for real: each is ended, its attempt counted and reported, and the next job runs."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from worker_fakes import submit
from worker_processes import Start, ended, noted

from nimble_jobs.job import JobState
from nimble_jobs.store import Store
from tests.waiting import PATIENCE_S, until


@pytest.mark.parametrize("how", ["spin", "sleep", "stop"])
def test_a_child_without_progress_is_ended(store: Store, start: Start, tmp_path: Path, how: str) -> None:
    """Spinning in C code with the interpreter's lock, asleep in a system call, stopped by SIGSTOP: all the same."""
    job = submit(store, tmp_path, do="stall", how=how, stall="6s")  # the second attempt is not to stall on busy cores
    other = submit(store, tmp_path, name="next", do="batches")
    worker = start()
    done, next_done = ended(store, job, other)
    assert (done.state, next_done.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    first, second = store.jobs.attempts(job.id)
    assert (first.outcome, second.outcome) == ("stalled", "succeeded")
    reason = "no progress for 6s (run.stall) in phase start"
    if how == "stop":
        reason += "; its process was stopped by a signal"
    assert first.error == reason
    assert (first.finished_at or 0) - first.started_at >= 6
    (event,) = [e for e in store.jobs.events(job.id) if e.kind == "requeued"]
    log = (store.home / "logs" / f"{job.id}.log").read_text()
    assert f"attempt 1: {reason}; the job is queued" in log
    assert re.fullmatch(rf"{re.escape(reason)}; next attempt in [0-9]+(ms|s)", event.message)
    if how != "stop":  # the job's log says where it hung
        assert "(most recent call first)" in log
        assert "in _stand_still" in log
    _, hung, sleeper = noted(tmp_path)[1]
    until(lambda: not _lives(int(sleeper.split()[1])))  # it was of the same process group
    assert noted(tmp_path)[-1][1] != hung
    assert worker.poll() is None


def test_a_job_that_always_stalls_fails(store: Store, start: Start, tmp_path: Path) -> None:
    """Each attempt counts; after the last the job has failed, and says why."""
    job = submit(store, tmp_path, do="stall", how="sleep", times=9, stall="300ms")
    start()
    (done,) = ended(store, job)
    assert done.state is JobState.FAILED
    assert done.error == ("no progress for 300ms (run.stall) in phase start (attempt 3 of 3)")
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["stalled"] * 3


def test_slow_progress_is_progress(store: Store, start: Start, tmp_path: Path) -> None:
    """A job that takes longer than its limit in all, but never between two batches, is left alone."""
    job = submit(store, tmp_path, do="batches", count=18, sleep_s=0.4, stall="6s")
    start()
    (done,) = ended(store, job)
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["succeeded"]
    assert done.state is JobState.SUCCEEDED


def test_a_child_that_hangs_while_it_starts(store: Store, start: Start, tmp_path: Path) -> None:
    """It is ended after limits.start, and another one is tried; the worker gives up after five, and says why."""
    (store.home / "config.yaml").write_text("version: 1\nlimits: {start: 300ms}\n")
    worker = start(target="hangs")
    until(lambda: store.workers.live())
    assert worker.wait(timeout=PATIENCE_S) == 1
    log = (tmp_path / "worker-0.log").read_text()
    assert log.count("the child process was not ready within 300ms and is killed") == 5
    assert "5 child processes in a row died before they were ready" in log


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
