"""Counts of the schedules that are stored and of all uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nimble_jobs.store.prune import aged, stored_bytes
from nimble_jobs.store.records import ScheduleState

if TYPE_CHECKING:
    from nimble_jobs.store.store import Store


def statistics(store: Store) -> dict[str, Any]:
    """Of the stored schedules: how many in each state, hits, bytes, artifacts. Of all uses since the state folder was
    made: how many of each kind, misses by reason, and the seconds of building that the hits saved.
    """
    entries = aged(store.schedules.list())
    artifacts = store.schedules.artifacts()
    uses = store.schedules.uses()
    return {
        "schedules": len(entries),
        **{state.value: sum(entry.state == state for entry in entries) for state in ScheduleState},
        "hits": sum(entry.hits for entry in entries),
        "resident_hits": sum(entry.resident_hits for entry in entries),
        "bytes": stored_bytes(entries, artifacts),
        "artifacts": len({ref.name for refs in artifacts.values() for ref in refs}),
        "uses": {
            "resident": uses.resident,
            "stored": uses.stored,
            "miss": sum(uses.misses.values()),
            "total": uses.total,
        },
        "misses": uses.misses,
        "saved_s": uses.saved_s,
    }
