"""Moves a running job to a better schedule, between two of its batches."""

from __future__ import annotations

from dataclasses import dataclass

from nimble_jobs.planner import Prepared, Progress, improve
from nimble_jobs.planner.contest import faster_in_eager
from nimble_jobs.workloads.context import JobContext


@dataclass(frozen=True, kw_only=True)
class At:
    """Where a job stands between two batches."""

    record: int  # the first of the next batch, in the order of the input
    done: int  # records of this attempt whose results are on the host
    left: int  # records of this attempt that have not been sent to the device yet
    run_s: float  # since the first batch of this attempt was asked for


def due(context: JobContext, prepared: Prepared, at: At) -> bool:
    """Whether `better` has something to do. Cheap: asked before each batch, while others may be in flight."""
    if prepared.progress is not Progress.BUILDING:
        return False
    assert context.builders is not None
    return not context.builders.running(prepared.loaded.key)


def better(context: JobContext, prepared: Prepared, at: At) -> Prepared:
    """What the job goes on with; the same as was given where nothing is better. The job says so.

    To be called with nothing in flight: what was captured is closed. Raises OutOfMemory, DeviceFault.
    """
    if prepared.progress is not Progress.BUILDING:
        return prepared
    assert context.builders is not None
    before = prepared.loaded.schedule
    found = improve(
        prepared, store=context.store, residents=context.residents, builders=context.builders, report=context.report
    )
    after, key = found.loaded.schedule, found.loaded.key
    if found.progress is Progress.MOVED and before is not None and after is not None:
        was, now = (f"{schedule.replay_us / 1e3:.4g} ms" for schedule in (before, after))
        gain = f"{was} a replay before, {now} now, measured while it ran{faster_in_eager(after)}"
        message = f"moved to {key[:12]} before record {at.record}: {gain}"
        context.event("schedule", message, {"key": key, "record": at.record})
    elif found.loaded.fallback is not None:
        message = f"runs in eager from record {at.record}: {found.loaded.fallback}"
        context.event("fallback", message, {"key": key})
    elif found.stays_because is not None:
        message = f"stays on what it began with: the better schedule was not loaded: {found.stays_because}"
        context.event("schedule", message, {"key": key, "record": at.record})
    elif found.progress is Progress.STAYS:
        context.event("schedule", "no better schedule came of the build beside it; see the worker's log", {"key": key})
    if found is not prepared:
        context.report(phase="run", schedule=found.summary())
    return found
