"""Keeps a state folder's schedules within cache.size, after each save."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from nimble_jobs.errors import SettingsError, StoreError

if TYPE_CHECKING:
    from nimble_jobs.store.contents import Contents
    from nimble_jobs.store.records import ScheduleEntry

FIELD = "cache.size"


def keep(store: Contents, now: float, *, in_use: Collection[str] = ()) -> tuple[ScheduleEntry, ...]:
    """Remove schedules over the limit, and record an event. Returns the removed schedules.

    Artifacts that no schedule needs go first, all of them, then schedules, the least recently used first.

    Schedules `in_use`, and those that a live worker holds resident, stay. If a removal fails, an event
    records that; the current job has its schedule anyway.
    """
    try:
        limit = store.settings.now().cache.size
        return () if limit is None else _keep(store, limit, now, in_use)
    except (SettingsError, StoreError) as e:
        store.jobs.event("pruned", f"{FIELD}: nothing was removed: {e}", now=now)
        return ()


def _keep(store: Contents, limit: int, now: float, in_use: Collection[str]) -> tuple[ScheduleEntry, ...]:
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
        f"{FIELD}: {removals.bytes:,} bytes removed; schedules: {count}, artifacts: {len(removals.artifacts)}",
        data={"keys": keys},
        now=now,
    )
    return tuple(r.entry for r in removals.schedules)


def _unneeded_bytes(store: Contents) -> int:
    needed = {ref.name for refs in store.schedules.artifacts().values() for ref in refs}
    return sum(store.artifacts.size(name) for name in store.artifacts.names() if name not in needed)
