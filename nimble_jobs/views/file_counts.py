"""Counts of new, changed and skipped files of jobs with `input.only_new`, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_jobs.job import Event, Job

_FILES = {
    "listed": "",
    "new": "",
    "changed": " since they were scored; scored again",
    "again": " scored again by the changed model",
    "skipped": " scored by earlier runs",
    "ignored": " changed since they were scored; left as they are",
    "settling": " written too recently; the next run scores them",
    "elsewhere": " already taken by another job of this name, which has not ended",
    "unusable": " unreadable",
    "vanished": " removed before they were read",
    "moved": " written to after they were listed; the next run scores them",
    "failed": " in shards that failed; the next run scores them",
}


def only_new(job: Job, events: Sequence[Event]) -> dict[str, int] | None:
    """The counts of a job with `input.only_new`; while it runs, as of its listing. None for other jobs, and before the
    listing.
    """
    counts = job.outputs.get("only_new") or next((e.data for e in reversed(events) if e.kind == "only-new"), None)
    return dict(counts) if counts else None


def lines(counts: dict[str, int]) -> list[tuple[str, str]]:
    """A line for each count of `only_new` that is not zero, with its meaning."""
    shown = [name for name in _FILES if counts.get(name) or name in ("listed", "new")]
    return [(name, f"{counts.get(name, 0):,}{_FILES[name]}") for name in shown]
