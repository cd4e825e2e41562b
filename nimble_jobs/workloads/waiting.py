"""Waiting for another process, for instance one that builds the schedule a job needs, until the job is to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nimble_jobs.planner.lookup.obtain import Waiting
from nimble_jobs.store import Wait
from nimble_jobs.workloads.context import JobContext, Stop, Stopped


def waiting(context: JobContext) -> Waiting:
    """For a wait for a schedule: records on the job which process builds it. Raises Stopped when the job is to end."""

    def tell(wait: Wait) -> None:
        text = f"{who(wait)} is building this schedule; the job waits for at most {wait.limit_s:.0f} s"
        context.event("wait", text, {})
        context.report(phase="wait")

    return told_once(context, tell)


def who(wait: Wait) -> str:
    """Who is waited for, in words."""
    return f"process {wait.pid}" if wait.pid else "another process"


def told_once(context: JobContext, tell: Callable[[Wait], None]) -> Waiting:
    """For any wait, which calls it again and again: calls `tell` once. Raises Stopped when the job is to end."""
    told = False

    def wait(found: Wait) -> None:
        nonlocal told
        if not told:
            tell(found)
            told = True
        go_on(context)

    return wait


def unless_stopped(context: JobContext) -> Callable[..., None]:
    """`context.report`, which raises Stopped when the job is to end."""

    def report(**given: Any) -> None:
        context.report(**given)
        go_on(context)

    return report


def go_on(context: JobContext) -> None:
    """Raises Stopped when the job is to end."""
    if context.stop() is not Stop.GO:
        raise Stopped
