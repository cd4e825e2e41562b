"""Removes what jobs that did not succeed left in object stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nimble_jobs.addresses import is_address
from nimble_jobs.data.object_runs import discard_objects, left_at
from nimble_jobs.errors import NimbleError
from nimble_jobs.job import JobState
from nimble_jobs.retention.folders import GRACE_S

if TYPE_CHECKING:
    from nimble_jobs.store import Store


@dataclass(frozen=True, kw_only=True)
class Left:
    """What one job left at an address, or why that could not be found or removed."""

    bytes: int = 0
    trouble: str | None = None
    jobs: frozenset[str] = frozenset()  # whose objects stay because of the trouble


def left_objects(store: Store, now: float, *, remove: bool) -> Iterator[Left]:
    """Each job that has ended for good without an output, and left objects; they are removed, or only counted."""
    for address in filter(is_address, store.expiry.outputs()):
        try:
            sizes = left_at(address)
        except NimbleError as e:
            yield Left(trouble=str(e))
            continue
        for job in store.jobs.of(ids=set(sizes)):
            ended = job.state.final and job.state is not JobState.SUCCEEDED
            if not ended or now - (job.finished_at or 0.0) < GRACE_S:
                continue
            try:
                if remove:
                    discard_objects(address, job.id)
            except NimbleError as e:
                yield Left(trouble=str(e), jobs=frozenset([job.id]))
            else:
                yield Left(bytes=sizes[job.id])
