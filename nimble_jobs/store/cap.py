"""The size that a user allows the schedules of a state folder: NIMBLE_JOBS_CACHE_SIZE, kept after each save."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from nimble_jobs.errors import StoreError, UsageError

if TYPE_CHECKING:
    from nimble_jobs.store.records import ScheduleEntry
    from nimble_jobs.store.store import Store

VARIABLE = "NIMBLE_JOBS_CACHE_SIZE"


def limit_bytes() -> int | None:
    """What the environment says; None where it says nothing. Raises UsageError."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    from nimble_jobs.spec.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as e:
        raise UsageError(f"{VARIABLE}: {e}") from e


def keep(store: Store, now: float, *, in_use: Collection[str] = ()) -> tuple[ScheduleEntry, ...]:
    """Remove what is over the limit, and note it as an event. Returns the schedules that went.

    Artifacts that no schedule needs go first, all of them, then schedules, the least recently used first.

    Schedules `in_use`, and those that a live worker holds resident, stay. What cannot be removed is noted, too: the
    job at hand has its schedule all the same.
    """
    limit = limit_bytes()
    if limit is None:
        return ()
    try:
        return _keep(store, limit, now, in_use)
    except StoreError as e:
        store.jobs.event("pruned", f"{VARIABLE}: nothing was removed: {e}", now=now)
        return ()


def _keep(store: Store, limit: int, now: float, in_use: Collection[str]) -> tuple[ScheduleEntry, ...]:
    if store.schedules.total_bytes() + _unneeded_bytes(store) <= limit:
        return ()
    from nimble_jobs.store import prune

    removals = prune.look(store, prune.Wish(max_bytes=limit), now, in_use=in_use)
    if not removals.schedules and not removals.artifacts:
        return ()
    count = prune.remove(store, removals)
    keys = [r.entry.key for r in removals.schedules]
    store.jobs.event(
        "pruned",
        f"{VARIABLE}: {removals.bytes:,} bytes removed; schedules: {count}, artifacts: {len(removals.artifacts)}",
        data={"keys": keys},
        now=now,
    )
    return tuple(r.entry for r in removals.schedules)


def _unneeded_bytes(store: Store) -> int:
    needed = {ref.name for refs in store.schedules.artifacts().values() for ref in refs}
    return sum(store.artifacts.size(name) for name in store.artifacts.names() if name not in needed)
