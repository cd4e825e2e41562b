"""Reading shards and members of jobs that several devices work on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from sqlalchemy import Integer, ScalarSelect, Select, Table, bindparam, func, or_, select
from sqlalchemy.orm import Session

from nimble_jobs.job import InFlight, Job, JobState, Member, ShardClaim, ShardCounts
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import load_object
from nimble_jobs.store.shard_tables import MemberRow, ShardRow
from nimble_jobs.store.tables import JobRow

_JOBS = cast(Table, JobRow.__table__)


class ShardQueries:
    """The reads of the tables of shards and members."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def settled(self, job: Job, indexes: Collection[int]) -> set[int]:
        """Which of these shards are done, or have failed for good."""
        query = select(ShardRow.index).where(
            ShardRow.job == job.id, ShardRow.index.in_(indexes), ShardRow.state.in_(("done", "failed"))
        )
        return self._db.read(lambda session: set(session.scalars(query)))

    def counts(self, job: Job) -> ShardCounts:
        """How many shards of the job are in which state."""
        query = select(ShardRow.state, func.count()).where(ShardRow.job == job.id).group_by(ShardRow.state)
        return ShardCounts(**dict(self._db.read(lambda session: session.execute(query).all())))

    def unfinished(self, job: Job) -> tuple[bool, bool]:
        """Whether shards of the job are open, and whether members work on some."""
        first = [
            select(ShardRow.index).where(ShardRow.job == job.id, ShardRow.state == state).limit(1).scalar_subquery()
            for state in ("open", "running")
        ]
        is_open, is_running = self._db.read(lambda session: session.execute(select(*first)).one())
        return is_open is not None, is_running is not None

    def records_left(self, job: Job) -> int:
        """Records of all shards that are not finished."""
        query = select(JobRow.records_total - JobRow.records_done).where(JobRow.id == job.id)
        return self._db.read(lambda session: session.scalar(query)) or 0

    def failed(self, job: Job) -> list[tuple[ShardClaim, str]]:
        """The shards that have failed for good, each with its last error."""
        query = select(ShardRow).where(ShardRow.job == job.id, ShardRow.state == "failed").order_by(ShardRow.index)

        def work(session: Session) -> list[tuple[ShardClaim, str]]:
            return [
                (ShardClaim(index=row.index, start=row.start, stop=row.stop), row.error or "")
                for row in session.scalars(query)
            ]

        return self._db.read(work)

    def in_flight(self, job: Job) -> list[InFlight]:
        """The shards that members work on."""
        columns = (ShardRow.index, ShardRow.stop - ShardRow.start, ShardRow.worker, ShardRow.second)
        query = select(*columns).where(ShardRow.job == job.id, ShardRow.state == "running").order_by(ShardRow.index)
        rows = self._db.read(lambda session: session.execute(query).all())
        return [
            InFlight(index=index, records=records, worker=str(worker), copied=second is not None)
            for index, records, worker, second in rows
        ]

    def members(self, job_id: str, attempt: int | None = None) -> list[Member]:
        """The members of a job's attempt, by default of its newest one, in the order in which they joined."""
        number = select(func.max(MemberRow.attempt)).where(MemberRow.job == job_id).scalar_subquery()
        query = (
            select(MemberRow)
            .where(MemberRow.job == job_id, MemberRow.attempt == (number if attempt is None else attempt))
            .order_by(MemberRow.joined_at, MemberRow.worker)
        )
        return self._db.read(lambda session: [_member(row) for row in session.scalars(query)])

    def working(self) -> dict[str, str]:
        """The ids of the jobs that members work on now, by worker."""
        query = (
            select(MemberRow.worker, MemberRow.job)
            .join(JobRow, JobRow.id == MemberRow.job)
            .where(
                JobRow.state == JobState.RUNNING.value,
                MemberRow.attempt == JobRow.attempt,
                MemberRow.left_at.is_(None),
            )
        )
        return self._db.read(lambda session: dict(session.execute(query).all()))


def software_of_job() -> ScalarSelect[str]:
    """What the members of a job's attempt run on, by the first of them: the others have joined it."""
    first = select(MemberRow.software).where(MemberRow.job == JobRow.id, MemberRow.attempt == JobRow.attempt)
    return first.order_by(MemberRow.joined_at, MemberRow.worker).limit(1).scalar_subquery()


def _wanting() -> Select[Any]:
    """The first running job that a worker may join. It is given by `wanted_by` when the query runs."""
    of_job = (MemberRow.job == JobRow.id, MemberRow.attempt == JobRow.attempt)
    active = (*of_job, MemberRow.left_at.is_(None))
    # No LIKE: SQLite prepares a statement anew whenever a pattern is bound, which takes longer than to run this one.
    kind = func.substr(MemberRow.device + ":", 1, bindparam("length", type_=Integer)) == bindparam("of_kind")
    same = select(MemberRow.worker).where(*active, kind)
    mine = select(MemberRow.worker).where(
        *of_job,
        MemberRow.worker == bindparam("for_worker"),
        or_(MemberRow.left_at.is_(None), MemberRow.failures >= JobRow.max_attempts),
    )
    open_ = select(ShardRow.index).where(ShardRow.job == JobRow.id, ShardRow.state == "open")
    members = select(func.count()).select_from(MemberRow).where(*active).scalar_subquery()
    return (
        select(JobRow.id)
        .where(
            JobRow.state == JobState.RUNNING.value,
            JobRow.gpus > 1,
            JobRow.foreground.is_(False),
            JobRow.cancel_requested.is_(False),
            same.exists(),
            ~mine.exists(),
            open_.exists(),
            members < JobRow.gpus,
        )
        .order_by(JobRow.rank, JobRow.seq)
        .limit(1)
    )


def joinable(wanting: Select[Any]) -> Select[Any]:
    """The columns of the job that a query finds, and what its members run on."""
    return select(*_JOBS.c, software_of_job().label("members_software")).where(JobRow.id == wanting.scalar_subquery())


def wanted_by(worker: str, device: str) -> dict[str, Any]:
    """The values for `WANTING` of a worker."""
    kind = device.partition(":")[0] + ":"
    return {"for_worker": worker, "of_kind": kind, "length": len(kind)}


# Built once, as in `transitions`: every claim asks this first.
WANTING = _wanting()
JOINABLE = joinable(WANTING)


def _member(row: MemberRow) -> Member:
    return Member(
        worker=row.worker,
        device=row.device,
        joined_at=row.joined_at,
        left_at=row.left_at,
        moved_at=row.moved_at,
        busy_s=row.busy_s,
        phase=row.phase,
        records_done=row.records_done,
        failures=row.failures,
        error=row.error,
        software=load_object(row.software),
    )
