"""Jobs that several devices work on: they claim shards, and whoever finishes one first has written it.

One member of a job leads: the worker in the job's row, which will publish. If it leaves, another member takes the lead
within the same attempt, since the one that left writes nothing any more. Every write is fenced by the attempt number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, case, delete, func, insert, select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import Job, JobState, ShardClaim
from nimble_jobs.store.changes import changed
from nimble_jobs.store.records import job_record, load_object
from nimble_jobs.store.shard_queries import ShardQueries, wanting
from nimble_jobs.store.shard_tables import MemberRow, ShardRow
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.transitions import held, owns, record_event

_AHEAD = 4  # a claim takes this share of what each member has left on average, so that none holds many at the end
_MOST = 32  # shards in a claim
_ROWS = 1000  # rows in one statement


class Left(StrEnum):
    """What is to be done after a member has left."""

    NOTHING = "nothing"  # others go on, or the attempt is over
    END = "end"  # nobody is left: the attempt is to be ended by whoever asks
    AGAIN = "again"  # nobody is left, but a shard was given up: the job is to be queued again, as after a stop
    FAIL = "fail"  # more shards have failed than the job tolerates


class Shards(ShardQueries):
    """The tables of shards and members. Time is always an argument: Unix seconds.

    A `job` is the record that `claim` or `join` returned: it holds the attempt, and the worker who asks.
    """

    def open(
        self, job: Job, device: str, bounds: Sequence[tuple[int, int]], done: Collection[int], *, bad: int, now: float
    ) -> None:
        """The leading member opens the shards that are not `done`, so that others may join. `bounds`: where each shard
        begins and ends; `bad`: bad records in those done. Raises FencedOut.
        """

        def work(session: Session) -> None:
            if not owns(session, job.id, job.attempt):
                raise FencedOut
            mine = ShardRow.job == job.id
            earlier = select(ShardRow.index, ShardRow.failures, ShardRow.state, ShardRow.error).where(mine)
            before = {
                index: (failures, state, error) for index, failures, state, error in session.execute(earlier).all()
            }
            changed(session, delete(ShardRow).where(mine))
            rows: list[dict[str, Any]] = []
            given_up = 0
            for index, (start, stop) in enumerate(bounds):
                failures, state, error = before.get(index, (0, "open", None))
                state = "done" if index in done else "failed" if state == "failed" else "open"
                given_up += stop - start if state == "failed" else 0
                facts = {"state": state, "attempt": 0, "failures": failures, "error": error}
                rows.append({"job": job.id, "index": index, "start": start, "stop": stop, **facts})
            for first in range(0, len(rows), _ROWS):
                session.execute(insert(ShardRow), rows[first : first + _ROWS])
            records = sum(stop - start for index, (start, stop) in enumerate(bounds) if index in done)
            counts = {
                "records_done": records + given_up,
                "records_bad": bad + given_up,
                "records_total": bounds[-1][1] if bounds else 0,
            }
            changed(session, update(JobRow).where(JobRow.id == job.id).values(**counts))
            _enter(session, job.id, job.attempt, str(job.worker), device, now)

        self._db.write(work)

    def join(self, worker: str, device: str, now: float) -> Job | None:
        """Become a member of a running job that wants more devices of this kind and has open shards, or None.

        The record's worker is this one, and `joined` is set.
        """
        query = wanting(worker, device)
        if self._db.read(lambda session: session.scalar(query)) is None:
            return None  # read first, so that an idle worker does not take the write lock

        def work(session: Session) -> Job | None:
            found = session.scalar(query)
            row = session.scalar(select(JobRow).where(JobRow.id == found).with_for_update())
            if row is None or row.state != JobState.RUNNING.value:
                return None
            _enter(session, row.id, row.attempt, worker, device, now)
            text = f"{device} (worker {worker}) joins"
            record_event(session, "member", text, now=now, job=row.id, attempt=row.attempt)
            return replace(job_record(row), worker=worker, joined=True)

        return self._db.write(work)

    def claim(self, job: Job, *, suspects: bool) -> list[ShardClaim]:
        """Take the next open shards, in order, or none if there are none. Raises FencedOut.

        With `suspects`, which only a member that holds no shard may ask for, a single shard that has failed before is
        taken if there is no other one.
        """

        def work(session: Session) -> list[ShardClaim]:
            if not owns(session, job.id, job.attempt):
                raise FencedOut
            is_open = [ShardRow.job == job.id, ShardRow.state == "open"]
            if not suspects:
                is_open.append(ShardRow.failures == 0)
            left = session.scalar(select(func.count()).where(*is_open)) or 0
            most = min(_MOST, math.ceil(left / (_AHEAD * max(1, len(_active(session, job))))))
            query = select(ShardRow).where(*is_open).order_by(ShardRow.failures, ShardRow.index).limit(max(1, most))
            rows = list(session.scalars(query))
            rows = rows[:1] if rows and rows[0].failures else [row for row in rows if not row.failures]
            for row in rows:
                row.state, row.worker, row.second, row.attempt = "running", str(job.worker), None, row.attempt + 1
            claims = [
                ShardClaim(index=row.index, start=row.start, stop=row.stop, suspect=row.failures > 0) for row in rows
            ]
            session.flush()
            return sorted(claims, key=lambda claim: claim.index)

        return self._db.write(work)

    def second(self, job: Job, index: int, now: float) -> ShardClaim | None:
        """Take a second copy of a shard that another member works on; None if that is over. Raises FencedOut."""

        def work(session: Session) -> ShardClaim | None:
            if not owns(session, job.id, job.attempt):
                raise FencedOut
            row = session.get(ShardRow, (job.id, index))
            if row is None or row.state != "running" or row.second is not None or row.worker == job.worker:
                return None
            row.second, row.attempt = str(job.worker), row.attempt + 1
            text = f"shard {index} of worker {row.worker} is slow, so worker {job.worker} works on a copy"
            record_event(session, "copy", text, now=now, job=job.id, attempt=job.attempt)
            return ShardClaim(index=row.index, start=row.start, stop=row.stop)

        return self._db.write(work)

    def finish(self, job: Job, index: int, sha256: str, bad: int, now: float) -> int:
        """The member has written a shard, with so many bad records. Whoever was first has written it.

        Returns the bad records of all finished shards, without those that have failed for good. Raises FencedOut.
        """

        def work(session: Session) -> int:
            row = held(session, job.id, job.attempt)
            if row is None:
                raise FencedOut
            this = (ShardRow.job == job.id, ShardRow.index == index)
            unfinished = ShardRow.state.in_(("open", "running"))
            values = {"state": "done", "worker": str(job.worker), "second": None, "sha256": sha256, "error": None}
            if changed(session, update(ShardRow).where(*this, unfinished).values(**values)):
                start, stop = session.execute(select(ShardRow.start, ShardRow.stop).where(*this)).one()
                row.records_done += stop - start
                row.records_bad += bad
                done = MemberRow.records_done + (stop - start)
                changed(session, update(MemberRow).where(*_me(job)).values(records_done=done, moved_at=now))
            lost = select(func.sum(ShardRow.stop - ShardRow.start)).where(
                ShardRow.job == job.id, ShardRow.state == "failed"
            )
            return int(row.records_bad) - int(session.scalar(lost) or 0)

        return self._db.write(work)

    def leads(self, job: Job) -> bool:
        """Whether this member is to publish. Raises FencedOut."""
        query = select(JobRow.worker).where(
            JobRow.id == job.id, JobRow.attempt == job.attempt, JobRow.state == JobState.RUNNING.value
        )
        worker = self._db.read(lambda session: session.scalar(query))
        if worker is None:
            raise FencedOut
        return worker == job.worker

    def release(self, job: Job) -> None:
        """The member no longer works on the shards that it holds; others may take them."""
        self._db.write(lambda session: _release(session, job, None))

    def retire(self, job: Job, now: float) -> bool:
        """Leave, because there is nothing left to do. False if the member leads by now, and so must stay."""

        def work(session: Session) -> bool:
            row = held(session, job.id, job.attempt)
            if row is not None and row.worker == job.worker:
                return False
            _release(session, job, None)
            changed(session, update(MemberRow).where(*_me(job)).values(left_at=now))
            return True

        return self._db.write(work)

    def leave(self, job: Job, *, now: float, error: str | None = None) -> Left:
        """The member works no more on the job, by itself or because its process died. `error`: what went wrong.

        Its shards become open again. With an error they have failed once more, and fail for good after `max_attempts`
        failures. If the member led the job, another one leads it from now on.
        """

        def work(session: Session) -> Left:
            row = held(session, job.id, job.attempt)
            if row is None:
                return Left.NOTHING
            _release(session, job, error)
            gone = {"left_at": now, "failures": MemberRow.failures + int(error is not None), "error": error}
            changed(session, update(MemberRow).where(*_me(job)).values(**gone))
            given_up = 0
            if error is not None:
                given_up, failed = _give_up(session, row, now)
                if failed > _tolerated(row):
                    return Left.FAIL
                if not given_up and _hopeless(session, row):
                    return Left.END
            others = _active(session, job)
            if not others:
                return Left.NOTHING if row.worker != job.worker else Left.AGAIN if given_up else Left.END
            why = f": {error}" if error is not None else ""
            lead = ""
            if row.worker == job.worker:
                row.worker = others[0].worker
                lead = f"; {others[0].device} (worker {others[0].worker}) leads it now"
            text = f"worker {job.worker} left the job{why}; {len(others)} go on{lead}"
            record_event(session, "member", text, now=now, job=job.id, attempt=job.attempt)
            return Left.NOTHING

        return self._db.write(work)

    def recover(self, alive: Callable[[str], bool], now: float) -> None:
        """Members whose worker is gone leave their jobs; other members go on. Jobs without any are left alone."""
        query = (
            select(MemberRow.worker, JobRow)
            .join(JobRow, JobRow.id == MemberRow.job)
            .where(
                JobRow.state == JobState.RUNNING.value,
                MemberRow.attempt == JobRow.attempt,
                MemberRow.left_at.is_(None),
            )
        )

        def members(session: Session) -> list[Job]:
            return [replace(job_record(row), worker=worker) for worker, row in session.execute(query)]

        for job in self._db.read(members):
            if not alive(str(job.worker)):
                self.leave(job, now=now, error=f"worker {job.worker} died")


def _enter(session: Session, job: str, attempt: int, worker: str, device: str, now: float) -> None:
    row = session.get(MemberRow, (job, attempt, worker))
    if row is None:
        row = MemberRow(job=job, attempt=attempt, worker=worker, records_done=0, failures=0)
        session.add(row)
    row.device, row.joined_at, row.moved_at, row.left_at, row.phase = device, now, now, None, None
    session.flush()


def _me(job: Job) -> tuple[ColumnElement[bool], ...]:
    return MemberRow.job == job.id, MemberRow.attempt == job.attempt, MemberRow.worker == job.worker


def _active(session: Session, job: Job) -> list[MemberRow]:
    """The members that work on the job, the first to join first."""
    query = select(MemberRow).where(
        MemberRow.job == job.id, MemberRow.attempt == job.attempt, MemberRow.left_at.is_(None)
    )
    return list(session.scalars(query.order_by(MemberRow.joined_at, MemberRow.worker)))


def _release(session: Session, job: Job, error: str | None) -> None:
    """Open the shards that the member holds, or leave them to whoever works on a copy."""
    running = (ShardRow.job == job.id, ShardRow.state == "running")
    changed(session, update(ShardRow).where(*running, ShardRow.second == job.worker).values(second=None))
    failed = {"failures": ShardRow.failures + 1, "error": error} if error is not None else {}
    values = {"state": case((ShardRow.second.is_(None), "open"), else_="running"), "worker": ShardRow.second}
    changed(
        session, update(ShardRow).where(*running, ShardRow.worker == job.worker).values(**values, second=None, **failed)
    )


def _give_up(session: Session, row: JobRow, now: float) -> tuple[int, int]:
    """Shards that failed too often have failed for good. Returns how many now, and how many have altogether."""
    query = select(ShardRow).where(
        ShardRow.job == row.id, ShardRow.state == "open", ShardRow.failures >= row.max_attempts
    )
    given_up = session.scalars(query).all()
    for shard in given_up:
        shard.state = "failed"
        row.records_done += shard.stop - shard.start
        row.records_bad += shard.stop - shard.start
        text = f"shard {shard.index} failed {shard.failures} times, the last time: {shard.error}"
        record_event(session, "shard-failed", text, now=now, job=row.id, attempt=row.attempt)
    session.flush()
    failed = select(func.count()).where(ShardRow.job == row.id, ShardRow.state == "failed")
    return len(given_up), session.scalar(failed) or 0


def _tolerated(row: JobRow) -> int:
    return int(load_object(row.spec).get("run", {}).get("max_failed_shards", 0))


def _hopeless(session: Session, row: JobRow) -> bool:
    """Whether members fail again and again, more often than they finish a shard."""
    of_attempt = (MemberRow.job == row.id, MemberRow.attempt == row.attempt)
    failures = int(session.scalar(select(func.sum(MemberRow.failures)).where(*of_attempt)) or 0)
    mine = select(MemberRow.worker).where(*of_attempt)
    done = select(func.count()).where(ShardRow.job == row.id, ShardRow.state == "done", ShardRow.worker.in_(mine))
    return failures >= row.max_attempts and failures > (session.scalar(done) or 0)
