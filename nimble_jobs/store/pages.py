"""Reading a part of many jobs or events, quickly: for pages that are asked for again and again."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import false, func, select
from sqlalchemy.orm import Session

from nimble_jobs.job import Event, Hit, Job, JobState
from nimble_jobs.store.changes import batched
from nimble_jobs.store.database import Database
from nimble_jobs.store.listed import Wanted, jobs_of, page_of
from nimble_jobs.store.records import event_record, job_record
from nimble_jobs.store.tables import EventRow, JobRow


class JobPages:
    """Queries whose time does not grow with the number of jobs, or only with a count in an index."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def page(self, wanted: Wanted, *, before: int | None = None) -> tuple[list[Job], int | None]:
        """At most `limit` jobs, the newest first, and where the next page begins: pass it as `before`. None: it ends.

        Jobs that are submitted or removed meanwhile do not shift the following pages. A page may be short though
        another one follows: see `page_of`. Without specs, as `listed`.
        """
        assert wanted.sort is None

        def work(session: Session) -> tuple[list[Job], int | None]:
            numbers, following = page_of(session, wanted, before=before)
            return jobs_of(session, numbers), following

        return self._db.read(work)

    def waiting(self) -> int:
        """How many queued jobs could be claimed by a worker, now or once their time comes."""
        free = (JobRow.foreground == false(), JobRow.held == false(), JobRow.blockers == 0)
        query = select(func.count()).where(JobRow.state == JobState.QUEUED.value, *free)
        return self._db.read(lambda session: int(session.scalar(query) or 0))

    def recent_misses(self, *, among: int, limit: int) -> list[Job]:
        """Those of the `among` newest jobs that found no stored schedule, the newest first, with all their fields."""
        newest = select(func.max(JobRow.seq)).scalar_subquery()
        query = select(JobRow).where(JobRow.seq > newest - among, JobRow.hit == Hit.MISS.value)
        query = query.order_by(JobRow.seq.desc()).limit(limit)
        return self._db.read(lambda session: [job_record(row) for row in session.scalars(query)])

    def event_span(self) -> tuple[int, int]:
        """The numbers of the oldest and the newest event that are kept; 0 and 0 if there are none."""
        first = select(EventRow.seq).order_by(EventRow.seq).limit(1)
        last = select(EventRow.seq).order_by(EventRow.seq.desc()).limit(1)  # two statements use the key, one would scan
        return self._db.read(lambda session: (session.scalar(first) or 0, session.scalar(last) or 0))

    def brief(self, ids: Sequence[str]) -> list[Job]:
        """The jobs with these ids, without their specs, in any order. Those that were removed are left out."""

        def work(session: Session) -> list[Job]:
            numbers = [seq for some in batched(ids) for seq in session.scalars(_SEQ.where(JobRow.id.in_(some)))]
            return jobs_of(session, numbers)

        return self._db.read(work)

    def events_of_kind(self, job_id: str, *kinds: str) -> tuple[Event, ...]:
        """The events of a job that are of these kinds, oldest first."""
        query = select(EventRow).where(EventRow.job == job_id, EventRow.kind.in_(kinds)).order_by(EventRow.seq)
        return self._db.read(lambda session: tuple(event_record(row) for row in session.scalars(query)))


_SEQ = select(JobRow.seq)
