"""How many bad records a job tolerates."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_jobs.data import BadRecord
from nimble_jobs.errors import DataError
from nimble_jobs.spec import RunSpec


def enforce_threshold(run: RunSpec, bad: int, total: int, seen: Sequence[BadRecord], *, what: str = "records") -> None:
    """Raise DataError, naming the last bad record, if more than `run.error_threshold` of all records are bad."""
    if run.error_threshold < 0 or bad <= run.error_threshold * total:
        return
    raise DataError(
        f"{bad} of {total} {what} are bad, more than run.error_threshold {run.error_threshold:g} allows "
        f"(raise it to leave out more bad records); the last one is {seen[-1].id}: {seen[-1].reason}"
    )
