"""Waiting for another process that builds the schedule a job needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nimble_jobs.planner.lookup.obtain import Waiting
from nimble_jobs.store import Wait
from nimble_jobs.workloads.context import JobContext, Stop, Stopped


def waiting(context: JobContext) -> Waiting:
    """Says on the job that another process builds its schedule, and raises Stopped when the job is to end."""
    told = False

    def wait(found: Wait) -> None:
        nonlocal told
        if not told:
            who = f"process {found.pid}" if found.pid else "another process"
            context.event("wait", f"{who} builds this schedule; waits for it, {found.limit_s:.0f} s at most", {})
            context.report(phase="wait")
            told = True
        if context.stop() is not Stop.GO:
            raise Stopped

    return wait


def unless_stopped(context: JobContext) -> Callable[..., None]:
    """`context.report`, which raises Stopped when the job is to end."""

    def report(**given: Any) -> None:
        context.report(**given)
        if context.stop() is not Stop.GO:
            raise Stopped

    return report
