"""What builds measured of single tasks, for later builds of whatever model: how long each way to run one took.

A row is believed only if its digest fits. One that is missing or damaged costs a measurement and nothing else, and what
it says decides speed only: schedules are compared with eager all the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from sqlalchemy import String, Text, delete, func, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from nimble_jobs.store.changes import batched, changed
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import dump, load_object, sha256
from nimble_jobs.store.tables import Base
from nimble_jobs.store.words import words
from nimble_jobs.task_times import Parts, TaskTimes

_MOST = 4096  # rows, of about 2 KB each; those of the longest unused tasks go first


class TaskTimesRow(Base):
    """The times of the ways to run a kind of task."""

    __tablename__ = "task_times"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    parts: Mapped[str] = mapped_column(Text)  # JSON object: operation, shapes, ways, device, software
    text: Mapped[str] = mapped_column(Text)  # JSON of TaskTimes
    sha256: Mapped[str] = mapped_column(String(64))  # of the columns above
    last_used_at: Mapped[float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Facts about a row, for those who remove some."""

    key: str
    parts: Mapping[str, str]
    last_used_at: float  # Unix seconds


class StoredTaskTimes:
    """The table of task times. Time is always an argument: Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def read(self) -> dict[str, TaskTimes]:
        """Every sound row, by key. Raises StoreError."""
        query = select(TaskTimesRow.key, TaskTimesRow.parts, TaskTimesRow.text, TaskTimesRow.sha256)
        rows = self._db.read(lambda session: session.execute(query).all())
        found = {row.key: _record(row.text, sound=_digest(row.key, row.parts, row.text) == row.sha256) for row in rows}
        return {key: times for key, times in found.items() if times is not None}

    def save(
        self,
        measured: Mapping[str, tuple[Parts, TaskTimes]],
        now: float,
        *,
        model: str = "",
        used: Collection[str] = (),
        doubted: Collection[str] = (),
    ) -> None:
        """Keep what a build `measured`, by key, for a `model`. Rows that it `used` stay longer than others, and those
        that it `doubted` go. Raises StoreError.
        """
        rows = {
            key: (dump(dict(parts)), replace(times, measured_for=words(model) or None, measured_at=now))
            for key, (parts, times) in measured.items()
        }

        def work(session: Session) -> None:
            _delete(session, {*doubted, *rows})
            for several in batched(sorted(used)):
                touched = update(TaskTimesRow).where(TaskTimesRow.key.in_(several)).values(last_used_at=now)
                changed(session, touched)
            for key, (parts, times) in rows.items():
                text = dump(asdict(times))
                digest = _digest(key, parts, text)
                session.add(TaskTimesRow(key=key, parts=parts, text=text, sha256=digest, last_used_at=now))
            session.flush()
            _trim(session)

        if rows or used or doubted:
            self._db.write(work)

    def rows(self) -> list[Row]:
        """All rows, sound or not."""
        query = select(TaskTimesRow.key, TaskTimesRow.parts, TaskTimesRow.last_used_at).order_by(TaskTimesRow.key)
        rows = self._db.read(lambda session: session.execute(query).all())
        return [
            Row(key=key, parts={name: str(part) for name, part in load_object(parts).items()}, last_used_at=at)
            for key, parts, at in rows
        ]

    def count(self) -> int:
        """The number of rows."""
        return int(self._db.read(lambda session: session.scalar(select(func.count()).select_from(TaskTimesRow))) or 0)

    def damaged(self) -> list[str]:
        """Keys of the rows that are not believed."""
        sound = self.read()
        return [row.key for row in self.rows() if row.key not in sound]

    def remove(self, keys: Collection[str]) -> int:
        """Delete rows; returns their number."""
        return self._db.write(lambda session: _delete(session, keys))


def _delete(session: Session, keys: Iterable[str]) -> int:
    return sum(
        changed(session, delete(TaskTimesRow).where(TaskTimesRow.key.in_(several))) for several in batched(sorted(keys))
    )


def _trim(session: Session) -> None:
    """Delete the rows over the limit that were not used for longest."""
    newest_first = (TaskTimesRow.last_used_at.desc(), TaskTimesRow.key)
    surplus = session.scalars(select(TaskTimesRow.key).order_by(*newest_first).offset(_MOST)).all()
    _delete(session, surplus)


def _digest(key: str, parts: str, text: str) -> str:
    return sha256(dump([key, parts, text]))


def _record(text: str, *, sound: bool) -> TaskTimes | None:
    """The row's value; None if it is damaged, or written by a version that knows more."""
    try:
        return TaskTimes.from_plain(json.loads(text)) if sound else None
    except ValueError:
        return None
