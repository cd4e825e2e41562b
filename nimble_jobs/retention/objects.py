"""Removes what jobs left in object stores: those that did not succeed, or whose output was replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nimble_jobs.addresses import is_address
from nimble_jobs.data.object_runs import discard_objects, holder_of, left_at
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
    """Each job that has ended, has no output or no longer, and left objects; they are removed, or only counted."""
    for address in filter(is_address, store.expiry.outputs()):
        try:
            sizes, holder = left_at(address), holder_of(address)
        except NimbleError as e:
            yield Left(trouble=str(e))
            continue
        for job in store.jobs.of(ids=set(sizes)):
            # An output without a manifest may have been taken apart by its owner.
            needed = job.state is JobState.SUCCEEDED and holder in (None, job.id)
            if needed or not job.state.final or now - (job.finished_at or 0.0) < GRACE_S:
                continue
            try:
                if remove:
                    discard_objects(address, job.id)
            except NimbleError as e:
                yield Left(trouble=str(e), jobs=frozenset([job.id]))
            else:
                yield Left(bytes=sizes[job.id])
