"""Jobs that several devices work on: they claim shards, and whoever finishes one first has written it.

One member of a job leads: the worker in the job's row, which will publish. If it leaves, another member takes the lead
within the same attempt, since the one that left writes nothing any more. Every write is fenced by the attempt number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import Job, JobState, ShardClaim
from nimble_jobs.machine import Software, misfit
from nimble_jobs.plural import count
from nimble_jobs.store.changes import AS_IT_IS, changed, run
from nimble_jobs.store.records import job_record, load_object
from nimble_jobs.store.shard_changes import (
    active,
    begin,
    drop_from,
    enter,
    fence,
    first_active,
    first_failed,
    give_up,
    hopeless,
    is_active,
    me,
    note_change,
    release,
    reset,
    take,
    tolerated,
)
from nimble_jobs.store.shard_queries import JOINABLE, WANTING, ShardQueries, joinable, wanted_by
from nimble_jobs.store.shard_tables import MemberRow, ShardRow
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.transitions import End, held, leave_running, record_event

_AHEAD = 4  # a claim takes this share of what each member has left on average, so that none holds many at the end
_MOST = 32  # shards in a claim
_UNKNOWN: Software = {}
_LATE_S = (
    60.0  # a moment that is older than the last one by less was taken by a thread that then waited; clocks jump further
)
_AT_ONCE = 5000  # shards that one transaction opens; other writers wait meanwhile


def shards_in_claim(left: int, members: int) -> int:
    """How many shards a member takes at once, of so many that are open."""
    return max(1, min(_MOST, math.ceil(left / (_AHEAD * members))))


class Left(StrEnum):
    """What is to be done after a member has left."""

    NOTHING = "nothing"  # others go on, or the attempt is over
    END = "end"  # nobody is left: the attempt is to be ended by whoever asks
    AGAIN = "again"  # nobody is left, but a shard was given up: the job is to be queued again, as after a stop
    FAILED = "failed"  # more shards have failed than the job tolerates, so the job has failed


class Shards(ShardQueries):
    """The tables of shards and members. Time is always an argument: Unix seconds.

    A `job` is the record that `claim` or `join` returned: it holds the attempt, and the worker who asks.
    """

    def open(
        self,
        job: Job,
        device: str,
        bounds: Sequence[tuple[int, int]],
        done: Collection[int],
        *,
        bad: int,
        now: float,
        software: Software = _UNKNOWN,
    ) -> None:
        """The leading member opens the shards that are not `done`, so that others may join. `bounds`: where each shard
        begins and ends; `bad`: bad records in those done; `software`: what it runs on. Raises FencedOut.

        Rows are written in many transactions, so that other jobs go on meanwhile. The last one lets others join.
        """

        for first in range(0, max(1, len(bounds)), _AT_ONCE):
            piece = range(first, min(first + _AT_ONCE, len(bounds)))
            self._db.write(partial(reset, job=job, bounds=bounds, piece=piece, done=done))
        records = sum(stop - start for index, (start, stop) in enumerate(bounds) if index in done)

        def work(session: Session) -> None:
            fence(session, job)
            given_up = drop_from(session, job.id, len(bounds))
            counts = {
                "records_done": records + given_up,
                "records_bad": bad + given_up,
                "records_total": bounds[-1][1] if bounds else 0,
            }
            changed(session, update(JobRow).where(JobRow.id == job.id).values(**counts))
            enter(session, job, device, software, now)
            if done:
                note_change(session, job, software, now)

        self._db.write(work)

    def join(
        self,
        worker: str,
        device: str,
        now: float,
        *,
        software: Software = _UNKNOWN,
        may: Callable[[Job, str | None], bool] = lambda _job, misfit: misfit is None,
    ) -> Job | None:
        """Become a member of a running job that wants more devices of this kind and has open shards, or None.

        The record's worker is this one, and `joined` is set. `may` gets the job, and how this worker's `software`
        differs from what its other members run on. Jobs for which it is false are left to others.
        """
        query, of_job, given = WANTING, JOINABLE, wanted_by(worker, device)
        while True:  # read first, so that an idle worker does not take the write lock
            row = self._db.read_one(partial(_one, query=of_job, given=given))
            if row is None:
                return None
            if may(job_record(row), misfit(software, expected=load_object(row.members_software))):
                break
            query = query.where(JobRow.id != row.id)
            of_job = joinable(query)
        query = query.where(JobRow.id == row.id, JobRow.attempt == row.attempt)  # `may` was asked about this attempt

        def work(session: Session) -> Job | None:
            found = run(session, query, **given).scalar()
            row = session.scalar(select(JobRow).where(JobRow.id == found).with_for_update())
            if row is None or row.state != JobState.RUNNING.value:
                return None
            job = replace(job_record(row), worker=worker, joined=True)
            enter(session, job, device, software, now)
            text = f"{device} (worker {worker}) joins"
            record_event(session, "member", text, now=now, job=row.id, attempt=row.attempt)
            return job

        return self._db.write(work)

    def claim(self, job: Job, now: float, *, idle: bool) -> list[ShardClaim]:
        """Take the next open shards, in order, or none if there are none. Raises FencedOut.

        `idle`: the member holds no shard. Then a single shard that has failed before is taken if there is no other one.
        """

        def work(session: Session) -> list[ShardClaim]:
            fence(session, job)
            is_open = (ShardRow.job == job.id, ShardRow.state == "open")
            sound = (*is_open, ShardRow.failures == 0)
            members = max(1, active(session, job))
            some = select(ShardRow.index).where(*(is_open if idle else sound)).order_by(ShardRow.index)
            enough = some.limit(_MOST * _AHEAD * members).subquery()  # in order, since the others may all lie in front
            left = session.scalar(select(func.count()).select_from(enough)) or 0
            most = shards_in_claim(left, members)
            claims = take(session, job, select(ShardRow.index).where(*sound).order_by(ShardRow.index).limit(most))
            if not claims and idle:
                suspect = select(ShardRow.index).where(*is_open).order_by(ShardRow.failures, ShardRow.index).limit(1)
                claims = take(session, job, suspect)
            if claims and idle:
                begin(session, job, now)
            return claims

        return self._db.write(work)

    def second(self, job: Job, index: int, now: float, *, idle: bool) -> ShardClaim | None:
        """Take a second copy of a shard that another member works on; None if that is over. `idle`: the member holds no
        shard. Raises FencedOut.
        """

        def work(session: Session) -> ShardClaim | None:
            fence(session, job)
            row = session.get(ShardRow, (job.id, index))
            if row is None or row.state != "running" or row.second is not None or row.worker == job.worker:
                return None
            row.second, row.attempt = str(job.worker), row.attempt + 1
            text = f"shard {index} of worker {row.worker} is slow, so worker {job.worker} works on a copy"
            record_event(session, "copy", text, now=now, job=job.id, attempt=job.attempt)
            if idle:
                begin(session, job, now)
            return ShardClaim(index=row.index, start=row.start, stop=row.stop)

        return self._db.write(work)

    def finish(self, job: Job, index: int, bad: int, now: float) -> int:
        """The member has written a shard, with so many bad records. Whoever was first has written it.

        Returns the bad records of all finished shards, without those that have failed for good. Raises FencedOut.
        """

        def work(session: Session) -> int:
            fence(session, job)
            unfinished = (ShardRow.job == job.id, ShardRow.index == index, ShardRow.state.in_(("open", "running")))
            values = {"state": "done", "worker": str(job.worker), "second": None, "error": None}
            first = update(ShardRow).where(*unfinished).values(**values)
            bounds = session.execute(first.returning(ShardRow.start, ShardRow.stop), execution_options=AS_IT_IS)
            if (found := bounds.one_or_none()) is not None:
                records = found.stop - found.start
                counts = {"records_done": JobRow.records_done + records, "records_bad": JobRow.records_bad + bad}
                changed(session, update(JobRow).where(JobRow.id == job.id).values(**counts))
                spent_s = case((MemberRow.moved_at < now, now - MemberRow.moved_at), else_=0.0)  # clocks may be set
                more = {"records_done": MemberRow.records_done + records, "busy_s": MemberRow.busy_s + spent_s}
                late = and_(MemberRow.moved_at > now, MemberRow.moved_at < now + _LATE_S)
                moved_at = case((late, MemberRow.moved_at), else_=now)
                changed(session, update(MemberRow).where(*me(job)).values(**more, moved_at=moved_at))
            lost = select(func.sum(ShardRow.stop - ShardRow.start)).where(
                ShardRow.job == job.id, ShardRow.state == "failed"
            )
            all_bad = select(JobRow.records_bad - func.coalesce(lost.scalar_subquery(), 0)).where(JobRow.id == job.id)
            return int(session.scalar(all_bad) or 0)

        return self._db.write(work)

    def recount(self, job: Job, bad: int) -> None:
        """What is to be published has so many bad records. Raises FencedOut."""

        def work(session: Session) -> None:
            fence(session, job)
            changed(session, update(JobRow).where(JobRow.id == job.id).values(records_bad=bad))

        self._db.write(work)

    def release(self, job: Job) -> None:
        """The member no longer works on the shards that it holds; others may take them. Raises FencedOut."""

        def work(session: Session) -> None:
            fence(session, job)
            release(session, job, None)

        self._db.write(work)

    def retire(self, job: Job, now: float) -> bool:
        """Leave, because there is nothing left to do. False if the member leads by now, and so must stay. Raises
        FencedOut.
        """

        def work(session: Session) -> bool:
            row = held(session, job.id, job.attempt)
            if row is None:
                raise FencedOut
            if row.worker == job.worker:
                return False
            release(session, job, None)
            changed(session, update(MemberRow).where(*me(job)).values(left_at=now))
            return True

        return self._db.write(work)

    def leave(self, job: Job, *, now: float, error: str | None = None) -> Left:
        """The member works no more on the job, by itself or because its process died. `error`: what went wrong.

        Its shards become open again. With an error they have failed once more, and fail for good after `max_attempts`
        failures. If the member led the job, another one leads it from now on.
        """

        return self._leave(job, now, error)

    def _leave(self, job: Job, now: float, error: str | None, *, if_active: bool = False) -> Left:
        """`if_active`: only if the member has not left yet, as when several workers find it dead."""

        def work(session: Session) -> Left:
            row = held(session, job.id, job.attempt)
            if row is None or (if_active and not is_active(session, job)):
                return Left.NOTHING
            opened = release(session, job, error)
            gone = {"left_at": now, "failures": MemberRow.failures + int(error is not None), "error": error}
            changed(session, update(MemberRow).where(*me(job)).values(**gone))
            given_up = 0
            if error is not None:
                given_up, failed = give_up(session, row, opened, now)
                if failed > tolerated(row):  # in this transaction, so that no other member can publish first
                    why = f"{count(failed, 'shard')} failed {row.max_attempts} times; {first_failed(session, row.id)}"
                    end = End(to=JobState.FAILED, message=why, error=why)
                    leave_running(session, job.id, job.attempt, end, now=now)
                    return Left.FAILED
                if not given_up and hopeless(session, row):
                    return Left.END
            others = active(session, job)
            if not others:
                return Left.NOTHING if row.worker != job.worker else Left.AGAIN if given_up else Left.END
            why = f": {error}" if error is not None else ""
            lead = ""
            if row.worker == job.worker:
                row.worker, device = first_active(session, job)
                lead = f"; {device} (worker {row.worker}) leads it now"
            text = f"worker {job.worker} left the job{why}; {count(others, 'device')} still at work{lead}"
            record_event(session, "member", text, now=now, job=job.id, attempt=job.attempt)
            return Left.NOTHING

        return self._db.write(work)

    def recover(self, alive: Callable[[str], bool], now: float) -> list[Job]:
        """Members whose worker is gone leave their jobs; other members go on. Jobs without any are left alone.

        Returns the jobs that have failed with that.
        """
        failed: list[Job] = []
        for worker, job in self.working().items():
            if not alive(worker):
                failed += self._bury(worker, job, now)
        return failed

    def _bury(self, worker: str, job_id: str, now: float) -> list[Job]:
        row = self._db.read(lambda session: session.scalar(select(JobRow).where(JobRow.id == job_id)))
        if row is None:
            return []
        job = replace(job_record(row), worker=worker)
        left = self._leave(job, now, f"worker {worker} died", if_active=True)
        return [replace(job, state=JobState.FAILED)] if left is Left.FAILED else []


def _one(connection: Connection, *, query: Select[Any], given: dict[str, Any]) -> Any:
    """The row of a query, None if there is none."""
    return connection.execute(query, given).one_or_none()
