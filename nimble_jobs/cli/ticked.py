"""A timer's spec for commands that check its model or data, with the templates of a tick filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nimble_jobs.cli import output

if TYPE_CHECKING:
    from nimble_jobs.spec import JobSpec


def as_of_a_tick(spec: JobSpec) -> JobSpec:
    """The job of the last tick, with a note on stderr if it has templates; any other spec unchanged."""
    if spec.cron is None:
        return spec
    from nimble_jobs import cron
    from nimble_jobs.ticks import local_text

    job, tick = cron.as_of(spec)
    if job.input.source != spec.input.source:
        output.note(f"with the templates of the last tick, {local_text(tick, spec.cron.timezone)}")
    return job


def when(spec: JobSpec) -> str:
    """`; a timer: at 02:15 every day, Europe/Berlin`, or nothing."""
    if spec.cron is None:
        return ""
    from nimble_jobs import cron

    return f"; a timer: {cron.look(spec).words}"
