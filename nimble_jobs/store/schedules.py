"""Stored schedules. What comes out is what went in, or it is a miss that says why."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import Damaged, NotFound, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.schedule import FORMAT_VERSION, Schedule
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import ScheduleEntry, ScheduleState, StoredSchedule, dump, load_object, sha256
from nimble_jobs.store.tables import ResidentRow, ScheduleRow, ScheduleTextRow
from nimble_jobs.store.transitions import changed, record_event

# What the digest of a row covers, beside the text: all that was measured or that the key was made of.
_COVERED = (
    "key",
    "format_version",
    "parts",
    "model",
    "device",
    "input",
    "dtype",
    "mode",
    "streams",
    "syncs",
    "replay_us",
    "eager_us",
    "bytes",
    "created_at",
)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A stored schedule, or why there is none."""

    stored: StoredSchedule | None = None
    reason: str | None = None  # of the miss
    refused: str | None = None  # it failed its check: building it again would fail again


class Schedules:
    """The schedules of a store, by key. Time is always an argument: Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def find(self, key: str, now: float | None = None) -> StoredSchedule | None:
        """The sound schedule of a key, or None. `lookup` says why."""
        return self.lookup(key, now).stored

    def lookup(self, key: str, now: float | None = None) -> Lookup:
        """The schedule of a key, its digest just verified. A damaged one is quarantined, which `now` dates."""
        row, text = self._read(key)
        if row is None:
            return Lookup(reason="no schedule is stored under this key")
        if row.state != ScheduleState.READY.value:
            refused = row.reason if row.refused else None
            return Lookup(reason=f"the stored schedule is quarantined: {row.reason}", refused=refused)
        try:
            stored = _verified(row, text)
        except Damaged as e:
            self._set_aside(key, str(e), time.time() if now is None else now, refused=False, digest=row.sha256)
            return Lookup(reason=f"the stored schedule is quarantined: {e}")
        if stored.state is ScheduleState.STALE:
            return Lookup(reason=f"the stored schedule is stale: {stored.reason}")
        return Lookup(stored=stored)

    def save(self, schedule: Schedule, *, parts: Mapping[str, str], now: float) -> None:
        """Keep a schedule under its key, durably, in place of what was there. It is ready from now on."""
        text = schedule.to_json()
        program = schedule.program
        constants = sum(program.buffers[port.view.buffer].nbytes for port in program.constants)
        covered: dict[str, Any] = {
            "key": schedule.key,
            "format_version": schedule.format_version,
            "parts": dump(dict(parts)),
            "model": parts.get("model.source", ""),
            "device": schedule.device,
            "input": parts.get("input", ""),
            "dtype": parts.get("model.dtype", ""),
            "mode": parts.get("mode", ""),
            "streams": schedule.plan.streams,
            "syncs": len(schedule.plan.syncs),
            "replay_us": float(schedule.replay_us),
            "eager_us": float(schedule.eager_us),
            "bytes": len(text.encode()) + constants,
            "created_at": float(now),
        }
        assert tuple(covered) == _COVERED
        ready = ScheduleState.READY.value
        digest = _digest(covered, text)

        def work(session: Session) -> None:
            hits = session.scalar(select(ScheduleRow.hits).where(ScheduleRow.key == schedule.key)) or 0
            _delete(session, [schedule.key])
            session.add(ScheduleRow(**covered, sha256=digest, hits=hits, last_used_at=now, state=ready, refused=False))
            session.flush()
            session.add(ScheduleTextRow(key=schedule.key, text=text))

        self._db.write(work)

    def touch(self, key: str, hit: Hit, now: float) -> None:
        """Count a hit and note the time, with the next transaction. Nothing happens when the schedule is gone."""
        used = update(ScheduleRow).where(ScheduleRow.key == key)
        used = used.values(last_used_at=now, hits=ScheduleRow.hits + (hit != Hit.MISS))
        self._db.write_soon(lambda session: changed(session, used))

    def ready(self, key: str) -> bool:
        """Whether a schedule is stored under the key and nobody has set it aside. Reads no JSON."""
        query = select(ScheduleRow.state).where(ScheduleRow.key == key)
        return self._db.read(lambda session: session.scalar(query)) == ScheduleState.READY.value

    def quarantine(self, key: str, reason: str, now: float) -> None:
        """Use this schedule no more: its bytes are in doubt. The next job that needs it builds it again."""
        self._set_aside(key, reason, now, refused=False)

    def refuse(self, key: str, reason: str, now: float) -> None:
        """Use this schedule no more, and do not build it again: it does not agree with eager."""
        self._set_aside(key, reason, now, refused=True)

    def get(self, prefix: str) -> ScheduleEntry:
        """What is known of a schedule, by key or a prefix of at least 4 characters. Raises NotFound, UsageError."""

        def work(session: Session) -> list[ScheduleEntry]:
            exact = session.scalar(select(ScheduleRow).where(ScheduleRow.key == prefix))
            if exact is not None:
                return [_entry(exact)]
            query = select(ScheduleRow).where(ScheduleRow.key.startswith(prefix, autoescape=True)).limit(6)
            return [_entry(row) for row in session.scalars(query)] if len(prefix) >= 4 else []

        found = self._db.read(work)
        if not found:
            raise NotFound(f"schedule {prefix}: no stored schedule has this key; expected at least 4 characters of one")
        if len(found) > 1:
            keys = ", ".join(entry.key[:16] for entry in found[:5])
            raise UsageError(f"schedule {prefix}: the beginning of several keys: {keys}; expected more characters")
        return found[0]

    def remove(self, keys: Collection[str]) -> int:
        """Forget schedules. Returns how many there were. Artifacts stay: other schedules may use them."""
        return self._db.write(lambda session: _delete(session, keys))

    def stats(self) -> dict[str, int]:
        """How many schedules there are, in each state, with their hits and bytes."""
        entries = self.list()
        return {
            "schedules": len(entries),
            **{state.value: sum(entry.state == state for entry in entries) for state in ScheduleState},
            "hits": sum(entry.hits for entry in entries),
            "bytes": sum(entry.bytes for entry in entries),
        }

    def set_residents(self, worker: str, keys: Collection[str]) -> None:
        """Say which captured graphs a worker holds. What follows a colon in a key (which weights) is left out."""
        held = sorted({key.partition(":")[0] for key in keys})

        def work(session: Session) -> None:
            changed(session, delete(ResidentRow).where(ResidentRow.worker == worker))
            session.add_all(ResidentRow(worker=worker, key=key) for key in held)

        self._db.write(work)

    def residents(self, live: Collection[str]) -> dict[str, list[str]]:
        """Which of the live workers hold the captured graph of each key."""
        query = select(ResidentRow.key, ResidentRow.worker).order_by(ResidentRow.key, ResidentRow.worker)
        found: dict[str, list[str]] = {}
        for key, worker in self._db.read(lambda session: session.execute(query).all()):
            if worker in live:
                found.setdefault(key, []).append(worker)
        return found

    def verified(self, key: str) -> StoredSchedule:
        """A schedule in whatever state, its digest verified. Changes nothing. Raises NotFound, Damaged."""
        row, text = self._read(key)
        if row is None:
            raise NotFound(f"schedule {key}: no stored schedule has this key")
        return _verified(row, text)

    def list(self) -> list[ScheduleEntry]:
        """Every stored schedule, oldest first."""
        query = select(ScheduleRow).order_by(ScheduleRow.created_at, ScheduleRow.key)
        return self._db.read(lambda session: [_entry(row) for row in session.scalars(query)])

    def _read(self, key: str) -> tuple[ScheduleRow | None, str | None]:
        def work(session: Session) -> tuple[ScheduleRow | None, str | None]:
            row = session.get(ScheduleRow, key)
            return row, session.scalar(select(ScheduleTextRow.text).where(ScheduleTextRow.key == key))

        return self._db.read(work)

    def _set_aside(self, key: str, reason: str, now: float, *, refused: bool, digest: str | None = None) -> None:
        statement = update(ScheduleRow).where(ScheduleRow.key == key)
        if digest is not None:  # spare what another process saved since we looked
            statement = statement.where(ScheduleRow.sha256 == digest)
        statement = statement.values(state=ScheduleState.QUARANTINED.value, reason=reason, refused=refused)

        def work(session: Session) -> None:
            if changed(session, statement) == 1:
                message = f"schedule {key[:16]} quarantined: {reason}"
                record_event(session, "quarantined", message, now=now, data={"key": key})

        self._db.write(work)


def _verified(row: ScheduleRow, text: str | None) -> StoredSchedule:
    if text is None:
        raise Damaged(f"schedule {row.key}: damaged: its JSON is missing")
    if _digest({name: getattr(row, name) for name in _COVERED}, text) != row.sha256:
        raise Damaged(f"schedule {row.key}: damaged: its SHA-256 is not the one that was stored")
    return StoredSchedule(**_values(row), text=text)


def _digest(covered: Mapping[str, Any], text: str) -> str:
    return sha256(dump([dict(covered), text]))


def _delete(session: Session, keys: Collection[str]) -> int:
    count = 0
    for key in keys:
        changed(session, delete(ScheduleTextRow).where(ScheduleTextRow.key == key))
        count += changed(session, delete(ScheduleRow).where(ScheduleRow.key == key))
    return count


def _entry(row: ScheduleRow) -> ScheduleEntry:
    return ScheduleEntry(**_values(row))


def _values(row: ScheduleRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in (*_COVERED, "sha256", "hits", "last_used_at", "reason")}
    del values["format_version"]
    state = ScheduleState.READY if row.state == ScheduleState.READY.value else ScheduleState.QUARANTINED
    if state == ScheduleState.READY and row.format_version != FORMAT_VERSION:
        state = ScheduleState.STALE
        values["reason"] = f"written in format {row.format_version}; this version reads {FORMAT_VERSION}"
    return values | {"parts": {name: str(part) for name, part in load_object(row.parts).items()}, "state": state}
