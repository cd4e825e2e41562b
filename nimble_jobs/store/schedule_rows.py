"""Rows of stored schedules: their digests, and their conversion into records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from nimble_jobs.errors import Damaged
from nimble_jobs.schedule import FORMAT_VERSION, Schedule
from nimble_jobs.store.changes import changed
from nimble_jobs.store.records import (
    ArtifactRef,
    ScheduleEntry,
    ScheduleState,
    StoredSchedule,
    dump,
    load_object,
    sha256,
)
from nimble_jobs.store.tables import ScheduleArtifactRow, ScheduleRow, ScheduleTextRow

# Columns under the digest, beside the text and the artifacts: measurements, and the parts of the key.
COVERED = (
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
    "build_s",
    "provenance",
)


def digest_of(covered: Mapping[str, Any], artifacts: Iterable[ArtifactRef], text: str) -> str:
    """SHA-256, in hex, over everything stored about a schedule that does not change with its use."""
    named = sorted([ref.name, ref.kind, ref.bytes] for ref in artifacts)
    return sha256(dump([dict(covered), named, sha256(text)]))


def verified_record(row: ScheduleRow, artifacts: Collection[ArtifactRef], text: str | None) -> StoredSchedule:
    """The row and its text as a record. Raises Damaged if they have changed since they were stored."""
    if row.state not in (ScheduleState.READY.value, ScheduleState.QUARANTINED.value):
        raise Damaged(f"schedule {row.key}: damaged: its state is {row.state!r}")
    if text is None:
        raise Damaged(f"schedule {row.key}: damaged: its JSON is missing")
    if digest_of({name: getattr(row, name) for name in COVERED}, artifacts, text) != row.sha256:
        raise Damaged(f"schedule {row.key}: damaged: its bytes have changed since they were stored (SHA-256)")
    return StoredSchedule(**_values(row), text=text, artifacts=tuple(sorted(artifacts)))


def entry_record(row: ScheduleRow) -> ScheduleEntry:
    """The row as a record, sound or not."""
    return ScheduleEntry(**_values(row))


def read_rows(session: Session, key: str) -> tuple[ScheduleRow | None, tuple[ArtifactRef, ...], str | None]:
    """A schedule's row, artifacts and text, as far as they exist."""
    row = session.get(ScheduleRow, key)
    text = session.scalar(select(ScheduleTextRow.text).where(ScheduleTextRow.key == key))
    return row, artifacts_of(session, [key]).get(key, ()), text


def artifacts_of(session: Session, keys: Collection[str] | None = None) -> dict[str, tuple[ArtifactRef, ...]]:
    """The artifacts of each of the schedules, or of all, by key; schedules without any are left out."""
    table = ScheduleArtifactRow
    query = select(table.key, table.name, table.kind, table.bytes).order_by(table.key, table.name)
    if keys is not None:
        query = query.where(table.key.in_(keys))
    by_key: dict[str, tuple[ArtifactRef, ...]] = {}
    for key, name, kind, nbytes in session.execute(query):
        by_key[key] = (*by_key.get(key, ()), ArtifactRef(name=name, kind=kind, bytes=nbytes))
    return by_key


def delete_rows(session: Session, keys: Collection[str]) -> int:
    """Delete schedules; returns their number."""
    count = 0
    for several in _batches(sorted(keys)):
        changed(session, delete(ScheduleTextRow).where(ScheduleTextRow.key.in_(several)))
        changed(session, delete(ScheduleArtifactRow).where(ScheduleArtifactRow.key.in_(several)))
        count += changed(session, delete(ScheduleRow).where(ScheduleRow.key.in_(several)))
    return count


def needed_by(schedule: Schedule) -> set[ArtifactRef]:
    """The artifacts that a schedule needs in order to load."""
    program = schedule.program
    sizes = {port.name: program.buffers[port.view.buffer].nbytes for port in program.constants}
    needed = {ArtifactRef(name=name, kind="constant", bytes=nbytes) for name, nbytes in sizes.items()}
    if schedule.binaries is not None:
        end = max((kernel.start + kernel.nbytes for kernel in schedule.compiled), default=0)
        needed.add(ArtifactRef(name=schedule.binaries, kind="kernels", bytes=end))
    return needed


def _values(row: ScheduleRow) -> dict[str, Any]:
    values = {
        name: getattr(row, name) for name in (*COVERED, "runs", "sha256", "hits", "resident_hits", "last_used_at")
    }
    del values["format_version"]
    state, reason = ScheduleState.QUARANTINED, row.reason
    if row.state == ScheduleState.READY.value:
        state = ScheduleState.READY
    if state == ScheduleState.READY and row.format_version != FORMAT_VERSION:
        state = ScheduleState.STALE
        reason = f"written in format {row.format_version}; this version reads {FORMAT_VERSION}"
    texts = {name: {k: str(v) for k, v in load_object(values[name]).items()} for name in ("parts", "provenance")}
    return values | texts | {"state": state, "reason": reason}


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Batches, because databases limit the values in one statement."""
    return (keys[i : i + 500] for i in range(0, len(keys), 500))
