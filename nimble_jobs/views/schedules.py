"""Stored schedules: rows, all about one of them, and figures about their use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nimble_jobs.families import bucket_of, family_of
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.schedule import Schedule
    from nimble_jobs.store import ScheduleEntry, Store
    from nimble_jobs.store.records import ArtifactRef


def rows_of(store: Store, entries: Sequence[ScheduleEntry]) -> list[Row]:
    """The JSON rows of `cache ls`."""
    residents = store.schedules.residents([worker.id for worker in store.workers.live()])
    return [
        {
            "key": entry.key,
            "model": entry.model,
            "device": entry.device,
            "input": entry.input,
            "bucket": bucket_of(entry.parts),
            "family": family_of(entry.parts),
            "dtype": entry.dtype,
            "mode": entry.mode,
            "streams": entry.streams,
            "syncs": entry.syncs,
            "replay_us": entry.replay_us,
            "eager_us": entry.eager_us,
            "runs": entry.runs,
            "speedup": round(entry.eager_us / entry.replay_us, 3) if entry.replay_us else None,
            "bytes": entry.bytes,
            "hits": entry.hits,
            "resident_hits": entry.resident_hits,
            "build_s": entry.build_s,
            "created_at": figures.iso(entry.created_at),
            "last_used_at": figures.iso(entry.last_used_at),
            "state": entry.state.value,
            "reason": entry.reason,
            "resident": residents.get(entry.key, []),
        }
        for entry in entries
    ]


def grouped(rows: Sequence[Row]) -> list[Row]:
    """The rows in their order, each family's together where its first row stands, by length."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row["family"] or row["key"], []).append(row)
    return [row for family in families.values() for row in sorted(family, key=lambda row: row["bucket"] or 0)]


def brief(entry_key: str, reason: str | None) -> str:
    """A reason without the name of its schedule, for lines that name it already."""
    return (reason or "no reason was recorded").removeprefix(f"schedule {entry_key}: ")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """All about one stored schedule."""

    row: Row  # of `cache ls`; its state is `damaged` if the stored bytes have changed
    parts: dict[str, str]  # of its key
    facts: dict[str, Any]  # graph, candidates, check, memory, provenance
    files: list[dict[str, Any]]  # its artifacts
    sha256: str
    schedule: Schedule | None  # None if it is damaged, or this version cannot read it

    def json(self) -> Row:
        """The JSON of `cache show`."""
        return self.row | {"sha256": self.sha256, "key_parts": self.parts, "artifacts": self.files} | self.facts


def look(store: Store, key: str, *, every_byte: bool = True) -> Shown:
    """A schedule by its key, or the beginning of it. Changes nothing. Raises NotFound, UsageError.

    Without `every_byte` its artifacts, which may be large, are not read: whether they are damaged is left open.
    """
    from nimble_jobs.store.prune import aged

    entry = aged([store.schedules.get(key)])[0]
    row = rows_of(store, [entry])[0]
    schedule, damage = _read(store, entry.key)
    artifacts = store.schedules.artifacts([entry.key]).get(entry.key, ())
    files = [_looked_at(store, ref, every_byte=every_byte) for ref in artifacts]
    damage = damage or next((file["damage"] for file in files if file["damage"]), None)
    if damage is not None and row["state"] != "quarantined":
        row |= {
            "state": "damaged",
            "reason": f"{damage}; the next job that needs it quarantines it and builds it again",
        }
    facts: dict[str, Any] = {}
    if schedule:
        facts = {
            "graph": dataclasses.asdict(schedule.facts),
            "candidates": [dataclasses.asdict(candidate) for candidate in schedule.candidates],
            "choices": [dataclasses.asdict(choice) for choice in schedule.choices],
            "taken_from": schedule.sibling,
            "check": {"tolerance": schedule.tolerance, "error": schedule.error},
            "memory": {"peak_bytes": schedule.peak_bytes, "arena_bytes": schedule.arena_bytes},
        }
    origin = {name: entry.parts[name] for name in ("torch", "cuda", "driver", "triton") if name in entry.parts}
    facts["provenance"] = entry.provenance | origin
    return Shown(row=row, parts=entry.parts, facts=facts, files=files, sha256=entry.sha256, schedule=schedule)


def _read(store: Store, key: str) -> tuple[Schedule | None, str | None]:
    """The schedule, or how it is damaged; neither if this version cannot read its format."""
    from nimble_jobs.errors import Damaged

    try:
        stored = store.schedules.verified(key)
        return (None if stored.state == "stale" else stored.load()), None
    except Damaged as e:
        return None, brief(key, str(e))


def _looked_at(store: Store, ref: ArtifactRef, *, every_byte: bool) -> dict[str, Any]:
    """Facts about an artifact's file; `damage` says why its bytes cannot be used."""
    from nimble_jobs.errors import Damaged, NotFound

    damage = None
    try:
        if every_byte:
            with store.artifacts.in_use():
                store.artifacts.get(ref.name)
        elif not store.artifacts.has(ref.name):
            raise NotFound(f"artifact {ref.name}: missing")
    except (Damaged, NotFound) as e:
        damage = str(e)
    return dataclasses.asdict(ref) | {"stored": store.artifacts.has(ref.name), "damage": damage}


def statistics(store: Store) -> dict[str, Any]:
    """Counts of the stored schedules: how many in each state, their hits, bytes and artifacts.

    Also counts of all uses since the state folder was made: how many of each kind, misses by reason, and the seconds of
    building that the hits saved.
    """
    from nimble_jobs.store import ScheduleState
    from nimble_jobs.store.prune import aged, stored_bytes

    entries = aged(store.schedules.list())
    artifacts = store.schedules.artifacts()
    uses = store.schedules.uses()
    return {
        "schedules": len(entries),
        **{state.value: sum(entry.state == state for entry in entries) for state in ScheduleState},
        "hits": sum(entry.hits for entry in entries),
        "resident_hits": sum(entry.resident_hits for entry in entries),
        "bytes": stored_bytes(entries, artifacts),
        "task_times": store.task_times.count(),
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
