"""Ended jobs for retention: lists them, with the rows that belong to them, and removes them.

Each method is one short transaction over a limited number of rows, so that others do not wait long for the write lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState
from nimble_jobs.store.changes import batched, changed
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import load_after
from nimble_jobs.store.tables import AttemptRow, DailyRow, EventRow, JobRow, PublicationRow, WaitRow
from nimble_jobs.store.timer_tables import TickRow
from nimble_jobs.store.transitions import FINAL

_ROW_BYTES = 100  # estimated bytes of a row beside its texts: numbers, ids, entries in indexes


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that has ended. Times are Unix seconds."""

    seq: int
    id: str
    name: str
    kind: str  # score | finetune
    state: JobState
    attempt: int
    finished_at: float
    output: str | None  # its `output.path`; None if the stored spec is damaged
    bytes: int  # of its row, about


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The number of rows or files of each kind, and their approximate bytes."""

    counts: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            counts=Counter(self.counts) + Counter(other.counts), bytes=Counter(self.bytes) + Counter(other.bytes)
        )


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the table of publications."""

    token: str
    job: str
    path: str
    folder: str  # DEVICE:INODE
    at: float  # Unix seconds
    bytes: int  # of the row, about


class Expiry:
    """Retention's queries and removals in the database."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def ended(self, *, above: int, limit: int, before: float | None = None) -> list[Ended]:
        """Ended jobs with numbers above `above`, in order.

        `before`: only those that had ended by then, in Unix seconds.
        """
        at = func.coalesce(JobRow.finished_at, JobRow.created_at)
        size = _length(JobRow.name, JobRow.spec, JobRow.schedule, JobRow.timings, JobRow.outputs, JobRow.error)
        query = (
            select(
                JobRow.seq, JobRow.id, JobRow.name, JobRow.kind, JobRow.state, JobRow.attempt, at, JobRow.output, size
            )
            .where(JobRow.seq > above, JobRow.state.in_(FINAL))
            .order_by(JobRow.seq)
            .limit(limit)
        )
        if before is not None:
            query = query.where(at <= before)
        return [
            Ended(
                seq=row[0],
                id=row[1],
                name=row[2],
                kind=row[3],
                state=JobState(row[4]),
                attempt=row[5],
                finished_at=row[6],
                output=row[7],
                bytes=row[8],
            )
            for row in self._db.read(lambda session: session.execute(query).all())
        ]

    def newest(self, count: int) -> dict[str, int]:
        """For each name with at least `count` ended jobs, the number of the `count`-th newest."""
        rank = func.row_number().over(partition_by=JobRow.name, order_by=JobRow.seq.desc())
        ranked = select(JobRow.name, JobRow.seq, rank.label("rank")).where(JobRow.state.in_(FINAL)).subquery()
        query = select(ranked.c.name, ranked.c.seq).where(ranked.c.rank == count)
        return self._db.read(lambda session: {row[0]: row[1] for row in session.execute(query)})

    def of_timer(self, name: str, count: int) -> dict[str, bool]:
        """The jobs of a timer that have ended: whether each is one of its newest `count`, by the time of its tick."""
        query = select(TickRow.job).join(JobRow, JobRow.id == TickRow.job).order_by(TickRow.due.desc())
        query = query.where(TickRow.timer == name, JobRow.state.in_(FINAL))
        jobs = self._db.read(lambda session: list(session.scalars(query)))
        return {str(job): rank < count for rank, job in enumerate(jobs)}

    def needed(self) -> set[str]:
        """The jobs that unfinished jobs wait for or name in `run.after`, and the jobs of unfinished arrays."""
        after = select(JobRow.after).where(JobRow.state.not_in(FINAL), JobRow.after != "[]")
        arrays = select(JobRow.array).where(JobRow.state.not_in(FINAL), JobRow.array.is_not(None)).distinct()

        def work(session: Session) -> set[str]:
            ids = set(session.scalars(select(WaitRow.parent)))
            for text in session.scalars(after):
                ids.update(load_after(text))
            ids.update(session.scalars(select(JobRow.id).where(JobRow.array.in_(arrays))))
            return ids

        return self._db.read(work)

    def hanging(self, jobs: Sequence[Ended]) -> Tally:
        """Counts these jobs with their attempts, events and waits."""
        return self._db.read(lambda session: _tally(session, jobs))

    def remove(self, jobs: Sequence[Ended]) -> tuple[list[str], Tally]:
        """Remove these jobs with their rows in other tables. Returns the removed ids, and counts.

        A job stays if it was retried since it was read, or if another job waits for it now.
        """
        seen = {job.id: (job.state.value, job.attempt) for job in jobs}
        hanging = self.hanging(jobs)  # count before taking the write lock: the rows of an ended job are final

        def work(session: Session) -> tuple[list[str], Tally]:
            waited_for = exists().where(WaitRow.parent == JobRow.id)
            query = select(JobRow.id, JobRow.state, JobRow.attempt).where(JobRow.id.in_(seen), ~waited_for)
            locked = session.execute(query.with_for_update()).all()
            going = {job for job, state, attempt in locked if seen[job] == (state, attempt)}
            tally = hanging if len(going) == len(jobs) else _tally(session, [job for job in jobs if job.id in going])
            for table, column in ((EventRow, EventRow.job), (AttemptRow, AttemptRow.job), (WaitRow, WaitRow.job)):
                changed(session, delete(table).where(column.in_(going)))
            changed(session, delete(JobRow).where(JobRow.id.in_(going)))
            return sorted(going), tally

        return self._db.write(work)

    def events(self, before: float, *, limit: int, remove: bool, above: int = 0) -> tuple[Tally, int]:
        """Count events without a job that happened before a time, and remove them if `remove` says so.

        Returns also the number of the last one, which is the next `above`; 0 if there are no more.
        """
        size = _length(EventRow.kind, EventRow.message, EventRow.data)
        query = select(EventRow.seq, size).where(EventRow.job.is_(None), EventRow.at < before, EventRow.seq > above)
        rows = self._db.read(lambda session: session.execute(query.order_by(EventRow.seq).limit(limit)).all())
        numbers = [seq for seq, _ in rows]
        if remove and numbers:
            self._db.write(lambda session: changed(session, delete(EventRow).where(EventRow.seq.in_(numbers))))
        tally = Tally(counts={"events": len(rows)}, bytes={"events": sum(size for _, size in rows)})
        return tally, numbers[-1] if len(rows) == limit else 0

    def known(self, ids: Sequence[str]) -> set[str]:
        """The ones among these that are ids of jobs."""

        def work(session: Session) -> set[str]:
            present: set[str] = set()
            for some in batched(ids):
                present.update(session.scalars(select(JobRow.id).where(JobRow.id.in_(some))))
            return present

        return self._db.read(work)

    def outputs(self) -> list[str]:
        """The output paths of all jobs, each once."""
        query = select(JobRow.output).where(JobRow.output.is_not(None)).distinct()
        return self._db.read(lambda session: [str(path) for path in session.scalars(query)])

    def published(self, *, above: str, limit: int) -> list[Published]:
        """Publications in the order of their tokens, from those above `above` on."""
        row = PublicationRow
        size = _length(row.token, row.path, row.folder, row.manifest_sha256)
        query = select(row.token, row.job, row.path, row.folder, row.at, size).where(row.token > above)
        return [
            Published(token=token, job=job, path=path, folder=folder, at=at, bytes=nbytes)
            for token, job, path, folder, at, nbytes in self._db.read(
                lambda session: session.execute(query.order_by(row.token).limit(limit)).all()
            )
        ]

    def forget(self, tokens: Sequence[str]) -> None:
        """Remove the rows of these publications."""
        self._db.write(lambda session: changed(session, delete(PublicationRow).where(PublicationRow.token.in_(tokens))))

    def take_turn(self, duty: str, slot: float, now: float) -> bool:
        """Whether the caller gets the turn of `slot`, which only one of many callers does.

        `slot` and `now` in Unix seconds. After a clock was set back, entries from the future are ignored.
        """

        def work(session: Session) -> bool:
            stale = (DailyRow.slot < slot) | (DailyRow.slot > now)
            mine = update(DailyRow).where(DailyRow.duty == duty, stale).values(slot=slot, at=now)
            if changed(session, mine) == 1:
                return True
            if session.get(DailyRow, duty) is not None:
                return False
            session.add(DailyRow(duty=duty, slot=slot, at=now))
            session.flush()
            return True

        try:
            return self._db.write(work)
        except IntegrityError:  # on a database with several writers: another process was first
            return False

    def free_bytes(self) -> int:
        """Free bytes in the database file; 0 if there is no such file."""
        return self._db.free_bytes()

    def give_back(self, pages: int) -> bool:
        """Cut at most this many free pages off the database file. Returns whether there are more."""
        return self._db.give_back(pages)


def _tally(session: Session, jobs: Sequence[Ended]) -> Tally:
    ids = [job.id for job in jobs]
    counts, sizes = {"jobs": len(jobs)}, {"jobs": sum(job.bytes for job in jobs)}
    asked = (
        ("attempts", _length(AttemptRow.worker, AttemptRow.error), AttemptRow.job),
        ("events", _length(EventRow.kind, EventRow.message, EventRow.data), EventRow.job),
        ("waits", _length(WaitRow.job, WaitRow.parent), WaitRow.job),
    )
    for kind, size, column in asked:
        query = select(func.count(), func.coalesce(func.sum(size), 0)).where(column.in_(ids))
        counts[kind], sizes[kind] = (int(n) for n in session.execute(query).one())
    return Tally(counts=counts, bytes=sizes)


def _length(*texts: Any) -> ColumnElement[int]:
    """Approximate bytes of a row: the characters of these columns, and a fixed part."""
    total: ColumnElement[int] = func.coalesce(func.length(texts[0]), 0) + _ROW_BYTES
    for text in texts[1:]:
        total = total + func.coalesce(func.length(text), 0)
    return total
