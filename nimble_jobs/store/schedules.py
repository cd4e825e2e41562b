"""Stored schedules. A lookup returns exactly what was saved, or a miss with its reason."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Table, bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import Damaged, NotFound, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import totals
from nimble_jobs.store.changes import changed
from nimble_jobs.store.database import Database
from nimble_jobs.store.provenance import provenance
from nimble_jobs.store.records import ArtifactRef, ScheduleEntry, ScheduleState, StoredSchedule, dump
from nimble_jobs.store.schedule_rows import (
    COVERED,
    artifacts_of,
    delete_rows,
    digest_of,
    entry_record,
    needed_by,
    read_rows,
    verified_record,
)
from nimble_jobs.store.tables import ResidentRow, ScheduleArtifactRow, ScheduleRow, ScheduleTextRow
from nimble_jobs.store.totals import Total
from nimble_jobs.store.transitions import record_event
from nimble_jobs.store.uses import Uses, count_hit, count_miss, total_uses
from nimble_jobs.store.wanted import forget
from nimble_jobs.store.words import words

QUICK = "eager kernels, 1 stream"  # the candidate that is captured first
_SCHEDULES = cast(Table, ScheduleRow.__table__)
_STATE = select(_SCHEDULES.c.state).where(_SCHEDULES.c.key == bindparam("of_key"))


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A stored schedule, or the reason of the miss."""

    stored: StoredSchedule | None = None
    reason: str | None = None  # of the miss
    refused: str | None = None  # its check failed, and would fail again after another build


@dataclass(frozen=True, kw_only=True)
class BuildFacts:
    """The cost of a build, and the speed that it gave."""

    model: str
    dtype: str
    input: str
    build_s: float
    eager_us: float
    quick_us: float | None
    replay_us: float
    runs: str  # schedule | eager


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A schedule to save, with its facts. See `Schedules.save`."""

    schedule: Schedule
    parts: Mapping[str, str]
    origin: Mapping[str, str] | None = None
    refused: str | None = None


class Schedules:
    """The schedules of a store, by key. Time is always an argument: Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def find(self, key: str, now: float | None = None) -> StoredSchedule | None:
        """The sound schedule of a key, or None. `lookup` also gives the reason."""
        return self.lookup(key, now).stored

    def lookup(self, key: str, now: float | None = None, *, flush: bool = True) -> Lookup:
        """The verified schedule of a key. A damaged one is quarantined; `now` is the time of that.

        Without `flush`, hits that wait to be counted go on waiting, and the answer does not wait for the disk.
        """
        row, artifacts, text = self._db.read(lambda session: read_rows(session, key), flush=flush)
        if row is None:
            return Lookup(reason="no schedule is stored under this key")
        if row.state == ScheduleState.QUARANTINED.value:
            refused = row.reason if row.refused else None
            return Lookup(reason=f"the stored schedule is quarantined: {row.reason}", refused=refused)
        try:
            stored = verified_record(row, artifacts, text)
        except Damaged as e:
            self._set_aside(key, str(e), time.time() if now is None else now, refused=False, digest=row.sha256)
            return Lookup(reason=f"the stored schedule is quarantined: {e}")
        if stored.state is ScheduleState.STALE:
            return Lookup(reason=f"the stored schedule is stale: {stored.reason}")
        return Lookup(stored=stored)

    def save(
        self,
        schedule: Schedule,
        *,
        parts: Mapping[str, str],
        now: float,
        origin: Mapping[str, str] | None = None,
        refused: str | None = None,
    ) -> None:
        """Save a schedule durably under its key, in place of an older one. It is ready from now on.

        Its artifacts must be stored already. `origin`: what built it, if not this process. `refused`: why it must
        neither be used nor built again; then it never becomes ready.
        """
        self.save_all([Saving(schedule=schedule, parts=parts, origin=origin, refused=refused)], now)

    def save_all(self, savings: Collection[Saving], now: float) -> None:
        """`save` several, all or none of them."""
        rows = [(saving, *_rows(saving, now)) for saving in savings]

        def work(session: Session) -> None:
            forget(session, [saving.schedule.key for saving in savings])
            for saving, row, text, needed in rows:
                _replace(session, row, text, needed, now)
                if saving.origin is None:
                    totals.add(session, Total.BUILD, seconds=row["build_s"])
                if saving.refused is not None:
                    _note_quarantine(session, saving.schedule.key, saving.refused, now)

        self._db.write(work)

    def touch(self, key: str, hit: Hit, now: float) -> None:
        """Count a hit and its time, at the latest when the attempt ends. Does nothing if the schedule is gone."""
        if hit is not Hit.MISS:
            self._db.write_with_totals(lambda session: count_hit(session, key, hit, now))

    def missed(self, reason: str, now: float) -> None:
        """Count a miss and its reason, at the latest when the attempt ends."""
        self._db.write_with_totals(lambda session: count_miss(session, reason, now))

    def uses(self) -> Uses:
        """Counts of hits and misses since the state folder was made."""
        return self._db.read(total_uses)

    def ready(self, key: str) -> bool:
        """Whether the key has a stored schedule that is not quarantined. Reads no JSON."""
        state = self._db.read_one(lambda connection: connection.execute(_STATE, {"of_key": key}).scalar())
        return bool(state == ScheduleState.READY.value)

    def quarantine(self, key: str, reason: str, now: float, *, digest: str | None = None) -> None:
        """Set a schedule aside because its bytes are in doubt. The next job that needs it builds it again.

        `digest`: of the row that was checked; a newer row from another process is left alone.
        """
        self._set_aside(key, reason, now, refused=False, digest=digest)

    def refuse(self, key: str, reason: str, now: float) -> None:
        """Set a schedule aside for good, because its results differ from eager. It is not built again."""
        self._set_aside(key, reason, now, refused=True)

    def get(self, prefix: str) -> ScheduleEntry:
        """Facts about a schedule, by key or a prefix of at least 4 characters. Raises NotFound, UsageError."""

        def work(session: Session) -> list[ScheduleEntry]:
            exact = session.scalar(select(ScheduleRow).where(ScheduleRow.key == prefix))
            if exact is not None:
                return [entry_record(exact)]
            query = select(ScheduleRow).where(ScheduleRow.key.startswith(prefix, autoescape=True)).limit(6)
            return [entry_record(row) for row in session.scalars(query)] if len(prefix) >= 4 else []

        found = self._db.read(work)
        if not found:
            hint = "" if len(prefix) >= 4 else "; a shortened key needs at least 4 characters"
            raise NotFound(
                f"schedule {prefix}: no stored schedule has this key{hint}; list schedules with: nimble-jobs cache ls"
            )
        if len(found) > 1:
            keys = ", ".join(entry.key[:16] for entry in found[:5])
            raise UsageError(f"schedule {prefix}: several keys begin with this: {keys}; type more characters")
        return found[0]

    def remove(self, keys: Collection[str], *, digests: Mapping[str, str] | None = None) -> int:
        """Delete schedules. Returns their number. Artifacts stay, since other schedules may use them.

        `digests`: of the rows that were checked; newer rows from other processes are left alone.
        """

        def work(session: Session) -> int:
            if digests is None:
                return delete_rows(session, keys)
            stored = session.execute(select(ScheduleRow.key, ScheduleRow.sha256)).all()
            same = {row.key for row in stored if row.sha256 == digests.get(row.key)}
            return delete_rows(session, same.intersection(keys))

        return self._db.write(work)

    def set_residents(self, worker: str, bytes_of: Mapping[str, int]) -> None:
        """Record which captured graphs a worker holds, by key, and how many bytes of its device each one takes.

        The part of a key after a colon (the weights) is left out.
        """
        held = Counter[str]()
        for key, nbytes in bytes_of.items():
            held[key.partition(":")[0]] += nbytes

        def work(session: Session) -> None:
            changed(session, delete(ResidentRow).where(ResidentRow.worker == worker))
            session.add_all(ResidentRow(worker=worker, key=key, bytes=held[key]) for key in sorted(held))

        self._db.write(work)

    def forget_residents(self, alive: Callable[[str], bool]) -> None:
        """Delete the residents of dead workers, since a killed worker cannot do it."""
        query = select(ResidentRow.worker).distinct()
        gone = [worker for worker in self._db.read(lambda session: session.scalars(query).all()) if not alive(worker)]
        if gone:
            statement = delete(ResidentRow).where(ResidentRow.worker.in_(gone))
            self._db.write(lambda session: changed(session, statement))

    def residents(self, live: Collection[str]) -> dict[str, list[str]]:
        """For each key, the live workers that hold its captured graph."""
        query = select(ResidentRow.key, ResidentRow.worker).order_by(ResidentRow.key, ResidentRow.worker)
        workers: dict[str, list[str]] = {}
        for key, worker in self._db.read(lambda session: session.execute(query).all()):
            if worker in live:
                workers.setdefault(key, []).append(worker)
        return workers

    def resident_bytes(self) -> dict[str, int]:
        """The device memory of the schedules that each worker holds, as far as the worker reported it."""
        query = select(ResidentRow.worker, func.sum(ResidentRow.bytes)).group_by(ResidentRow.worker)
        rows = self._db.read(lambda session: session.execute(query).all())
        return {worker: int(nbytes or 0) for worker, nbytes in rows}

    def verified(self, key: str) -> StoredSchedule:
        """A schedule in any state, verified. Changes nothing. Raises NotFound, Damaged."""
        row, artifacts, text = self._db.read(lambda session: read_rows(session, key))
        if row is None:
            raise NotFound(f"schedule {key}: no stored schedule has this key")
        return verified_record(row, artifacts, text)

    def total_bytes(self) -> int:
        """An upper bound for the bytes of all schedules and artifacts: a shared artifact counts several times."""
        return int(self._db.read(lambda session: session.scalar(select(func.sum(ScheduleRow.bytes)))) or 0)

    def page(
        self, *, model: str | None = None, device: str | None = None, before: int | None = None, limit: int
    ) -> tuple[list[ScheduleEntry], int | None]:
        """At most `limit` schedules, the newest first, and where the next page begins: pass it as `before`.

        `model` and `device` are parts of names, whatever their case. A position counts the schedules shown before.
        """
        query = select(ScheduleRow).order_by(ScheduleRow.created_at.desc(), ScheduleRow.key)
        for column, part in ((ScheduleRow.model, model), (ScheduleRow.device, device)):
            if part is not None:
                query = query.where(func.lower(column).contains(part.lower(), autoescape=True))
        shown = before or 0
        rows = self._db.read(lambda s: [entry_record(row) for row in s.scalars(query.offset(shown).limit(limit + 1))])
        return rows[:limit], shown + limit if len(rows) > limit else None

    def list(self) -> list[ScheduleEntry]:
        """Every stored schedule, oldest first."""
        query = select(ScheduleRow).order_by(ScheduleRow.created_at, ScheduleRow.key)
        return self._db.read(lambda session: [entry_record(row) for row in session.scalars(query)])

    def builds(self, device: str, *, mode: str = "inference", newest: int = 50) -> tuple[BuildFacts, ...]:
        """Costs and speeds of builds on a device (its name), the newest first: for forward passes, or with the mode
        `training` for training steps.
        """
        row = ScheduleRow
        query = select(row).where(row.device == device, row.mode == mode, row.build_s > 0)
        query = query.where(row.state == ScheduleState.READY.value).order_by(row.created_at.desc()).limit(newest)
        names = ("model", "dtype", "input", "build_s", "eager_us", "quick_us", "replay_us", "runs")
        return self._db.read(
            lambda session: tuple(BuildFacts(**{n: getattr(r, n) for n in names}) for r in session.scalars(query))
        )

    def artifacts(self, keys: Collection[str] | None = None) -> dict[str, tuple[ArtifactRef, ...]]:
        """The artifacts of each schedule (None: of all), by key; schedules without artifacts are left out."""
        return self._db.read(lambda session: artifacts_of(session, keys))

    def named(self, names: Collection[str]) -> set[str]:
        """Those of the artifacts that a stored schedule needs, as of now. At most a few hundred at once."""
        query = select(ScheduleArtifactRow.name).where(ScheduleArtifactRow.name.in_(names)).distinct()
        return self._db.read(lambda session: set(session.scalars(query)))

    def _set_aside(self, key: str, reason: str, now: float, *, refused: bool, digest: str | None = None) -> None:
        statement = update(ScheduleRow).where(ScheduleRow.key == key)
        if digest is not None:  # leave alone what another process saved since the check
            statement = statement.where(ScheduleRow.sha256 == digest)
        statement = statement.values(state=ScheduleState.QUARANTINED.value, reason=reason, refused=refused)

        def work(session: Session) -> None:
            if changed(session, statement) == 1:
                _note_quarantine(session, key, reason, now)

        self._db.write(work)


def _rows(saving: Saving, now: float) -> tuple[dict[str, Any], str, set[ArtifactRef]]:
    """The columns of a schedule's row without its use counts, its text, and its artifacts."""
    schedule, parts = saving.schedule, saving.parts
    text = schedule.to_json()
    needed = needed_by(schedule)
    covered: dict[str, Any] = {
        "key": schedule.key,
        "format_version": schedule.format_version,
        "parts": dump(dict(parts)),
        "model": words(parts.get("model.source", "")),
        "device": schedule.device,
        "input": words(parts.get("input", "")),
        "dtype": parts.get("model.dtype", ""),
        "mode": parts.get("mode", ""),
        "streams": schedule.plan.streams,
        "syncs": len(schedule.plan.syncs),
        "replay_us": float(schedule.replay_us),
        "eager_us": float(schedule.eager_us),
        "bytes": len(text.encode()) + sum(ref.bytes for ref in needed),
        "created_at": float(now),
        "build_s": float(schedule.build_s),
        "provenance": dump(dict(provenance() if saving.origin is None else saving.origin)),
    }
    assert tuple(covered) == COVERED
    state = ScheduleState.READY if saving.refused is None else ScheduleState.QUARANTINED
    row = covered | {"sha256": digest_of(covered, needed, text), "state": state.value}
    row["runs"] = schedule.runs
    row["quick_us"] = next((c.replay_us for c in schedule.candidates if c.name == QUICK), None)
    return row | {"refused": saving.refused is not None, "reason": saving.refused}, text, needed


def _replace(session: Session, row: Mapping[str, Any], text: str, needed: Collection[ArtifactRef], now: float) -> None:
    """Insert a schedule's rows in place of older ones; hits of the older schedule still count."""
    key = row["key"]
    query = select(ScheduleRow.hits, ScheduleRow.resident_hits).where(ScheduleRow.key == key)
    hits, resident_hits = session.execute(query).one_or_none() or (0, 0)
    delete_rows(session, [key])
    session.add(ScheduleRow(**row, hits=hits, resident_hits=resident_hits, last_used_at=now))
    session.flush()
    session.add(ScheduleTextRow(key=key, text=text))
    session.add_all(ScheduleArtifactRow(key=key, name=ref.name, kind=ref.kind, bytes=ref.bytes) for ref in needed)


def _note_quarantine(session: Session, key: str, reason: str, now: float) -> None:
    record_event(session, "quarantined", f"schedule {key[:16]} quarantined: {reason}", now=now, data={"key": key})
