"""Removes local copies of inputs that jobs fetched, if no worker did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nimble_jobs.data import fetched
from nimble_jobs.errors import DataError
from nimble_jobs.retention.folders import GRACE_S, bytes_of
from nimble_jobs.retention.objects import Left

if TYPE_CHECKING:
    from nimble_jobs.store import Store


def left_copies(store: Store, now: float, *, remove: bool) -> Iterator[Left]:
    """The copies of each job that has ended or is not known; they are removed, or only counted."""
    going = {folder.name: folder for folder in fetched.held(store.home)}
    for job in store.jobs.of(ids=set(going)):
        if not job.state.final or now - (job.finished_at or 0.0) < GRACE_S:
            del going[job.id]
    for job_id, folder in going.items():
        size = bytes_of(folder)
        try:
            if remove:
                fetched.forget(store.home, job_id)
        except DataError as e:
            yield Left(trouble=str(e))
        else:
            yield Left(bytes=size)
