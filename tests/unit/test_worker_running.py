"""When an attempt has to be ended, by a clock that the tests turn."""

from __future__ import annotations

from typing import Any

import pytest

from nimble_jobs.job import Job, JobState
from nimble_jobs.worker.running import Running, Verdict, stall_of


def job(**values: Any) -> Job:
    given: dict[str, Any] = {
        "id": "j", "name": "n", "kind": "score", "state": JobState.RUNNING, "priority": 0, "attempt": 1,
        "max_attempts": 3, "device": "auto", "foreground": False, "key": None, "after": (), "not_before": 0.0,
        "timeout_s": None, "cancel_requested": False, "worker": "w", "created_at": 0.0, "started_at": 0.0,
        "finished_at": None, "records_done": 3, "records_total": 9, "records_bad": 0, "phase": "run", "error": None,
    }  # fmt: skip
    return Job(**(given | values))


def watched(running: Running, start: float, end: float, step: float = 0.25) -> float | None:
    """When the verdict falls that it stalled, looked at every `step` seconds without any progress."""
    now = start
    while now < end:
        now += step
        running.glance(False, now)
        if running.verdict(now) is Verdict.STALLED:
            return now
    return None


def test_a_stall_is_so_long_without_progress() -> None:
    """Progress starts the time anew; without a limit nothing stalls."""
    running = Running.begin(job(), 100.0, stall_s=10.0)
    assert watched(running, 100.0, 109.0) is None
    running.glance(True, 109.5)
    assert running.moved_at == 109.5
    assert watched(running, 109.5, 200.0) == 119.75
    running.look(job(), 120.0)
    assert running.stalled() == "no progress for 10s (run.stall) in phase run, 3 of 9 records done"
    assert running.stalled(stopped=True).endswith(" records done; its process was stopped by a signal")
    assert watched(Running.begin(job(), 0.0), 0.0, 1e4, 1.0) is None


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """A supervisor that was stopped for an hour, or a machine that slept, does not end what had no chance to move."""
    running = Running.begin(job(), 0.0, stall_s=10.0)
    running.glance(False, 3600.0)
    assert running.verdict(3600.0) is None
    assert watched(running, 3600.0, 4000.0) == 3608.25


def test_waiting_for_a_disk_is_no_stall() -> None:
    """Trouble that passes is waited out, however long that takes."""
    running = Running.begin(job(), 0.0, stall_s=10.0)
    running.waits("no space left", 1.0)
    assert watched(running, 1.0, 500.0) is None
    running.waits(None, 500.0)
    assert watched(running, 500.0, 600.0) == 510.25


@pytest.mark.parametrize(
    ("given", "default", "limit"), [(None, 1800.0, 1800.0), (5.0, 1800.0, 5.0), ("off", 1800.0, None), (5, None, 5.0)]
)
def test_a_spec_goes_before_the_configuration(given: object, default: float | None, limit: float | None) -> None:
    """run.stall, if the spec has it; `off` is no limit."""
    assert stall_of(job(spec={"run": {"stall": given}}), default) == limit


def test_timeout_and_cancel_come_first() -> None:
    """An attempt past its time, or cancelled, ends so even if it stalls as well."""
    running = Running.begin(job(timeout_s=5.0), 0.0, stall_s=1.0)
    running.still_s = 60.0
    assert running.verdict(5.1) is Verdict.STALLED
    assert running.verdict(60.0) is Verdict.OVERTIME
    cancelled = Running.begin(job(), 0.0, stall_s=1.0)
    cancelled.look(job(state=JobState.CANCELLED), 10.0)
    cancelled.still_s = 60.0
    assert cancelled.verdict(20.0) is Verdict.CANCELLED
