"""What transactions do with the rows of shards and members. The caller has locked the job's row.

No statement reads all rows of a large job: each looks up rows by their key, or reads the first of those in one state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import Job, ShardClaim
from nimble_jobs.machine import Software, misfit
from nimble_jobs.store.changes import AS_IT_IS, changed
from nimble_jobs.store.records import dump, load_object
from nimble_jobs.store.shard_tables import MemberRow, ShardRow
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.transitions import owns, record_event

_ROWS = 1000  # rows in one statement


def fence(session: Session, job: Job) -> None:
    """Lock the job's row. Raises FencedOut if the attempt no longer runs it."""
    if not owns(session, job.id, job.attempt):
        raise FencedOut


def reset(
    session: Session, *, job: Job, bounds: Sequence[tuple[int, int]], piece: range, done: Collection[int]
) -> None:
    """Write the rows of these shards anew. Failures of earlier attempts stay. Raises FencedOut."""
    fence(session, job)
    these = (ShardRow.job == job.id, ShardRow.index >= piece.start, ShardRow.index < piece.stop)
    query = select(ShardRow.index, ShardRow.failures, ShardRow.state, ShardRow.error).where(*these)
    before = {index: (failures, state, error) for index, failures, state, error in session.execute(query).all()}
    if before:
        changed(session, delete(ShardRow).where(*these))
    rows: list[dict[str, Any]] = []
    for index in piece:
        failures, state, error = before.get(index, (0, "open", None))
        state = "done" if index in done else "failed" if state == "failed" else "open"
        facts = {"state": state, "attempt": 0, "failures": failures, "error": error}
        rows.append({"job": job.id, "index": index, "start": bounds[index][0], "stop": bounds[index][1], **facts})
    for first in range(0, len(rows), _ROWS):
        session.execute(insert(ShardRow), rows[first : first + _ROWS])


def drop_from(session: Session, job: str, index: int) -> int:
    """Remove the rows of shards from `index` on, which the job no longer has. Returns the records of failed shards."""
    changed(session, delete(ShardRow).where(ShardRow.job == job, ShardRow.index >= index))
    lost = func.sum(ShardRow.stop - ShardRow.start)
    return int(session.scalar(select(lost).where(ShardRow.job == job, ShardRow.state == "failed")) or 0)


def take(session: Session, job: Job, indexes: Select[Any]) -> list[ShardClaim]:
    """The member works on these shards from now on."""
    mine = {"state": "running", "worker": str(job.worker), "second": None, "attempt": ShardRow.attempt + 1}
    taken = update(ShardRow).where(ShardRow.job == job.id, ShardRow.index.in_(indexes)).values(**mine)
    taken = taken.returning(ShardRow.index, ShardRow.start, ShardRow.stop, ShardRow.failures)
    rows = session.execute(taken, execution_options=AS_IT_IS).all()
    claims = [ShardClaim(index=index, start=start, stop=stop, suspect=bad > 0) for index, start, stop, bad in rows]
    return sorted(claims, key=lambda claim: claim.index)


def begin(session: Session, job: Job, now: float) -> None:
    """The member held no shard before, and works on one from now on."""
    changed(session, update(MemberRow).where(*me(job)).values(moved_at=now))


def release(session: Session, job: Job, error: str | None) -> list[int]:
    """Open the shards that the member holds, or leave them to whoever works on a copy. Returns those now open.

    `error`: they have failed once more.
    """
    first = ShardRow.worker == job.worker
    alone = and_(first, ShardRow.second.is_(None))
    failed = {
        "failures": ShardRow.failures + case((first, 1), else_=0),
        "error": case((first, error), else_=ShardRow.error),
    }
    values = {
        "state": case((alone, "open"), else_="running"),
        "worker": case((first, ShardRow.second), else_=ShardRow.worker),
        "second": None,
        **(failed if error is not None else {}),
    }
    mine = (ShardRow.job == job.id, ShardRow.state == "running", or_(first, ShardRow.second == job.worker))
    released = update(ShardRow).where(*mine).values(**values).returning(ShardRow.index, ShardRow.state)
    rows = session.execute(released, execution_options=AS_IT_IS).all()
    return [index for index, state in rows if state == "open"]


def give_up(session: Session, row: JobRow, opened: Collection[int], now: float) -> tuple[int, int]:
    """Those of the `opened` shards that failed too often have failed for good. Returns how many, and how many have
    altogether.
    """
    query = select(ShardRow).where(
        ShardRow.job == row.id, ShardRow.index.in_(opened), ShardRow.failures >= row.max_attempts
    )
    given_up = session.scalars(query.order_by(ShardRow.index)).all()
    for shard in given_up:
        shard.state = "failed"
        row.records_done += shard.stop - shard.start
        row.records_bad += shard.stop - shard.start
        text = f"{_named(shard)} failed {shard.failures} times, the last time: {shard.error}"
        record_event(session, "shard-failed", text, now=now, job=row.id, attempt=row.attempt)
    session.flush()
    failed = select(func.count()).where(ShardRow.job == row.id, ShardRow.state == "failed")
    return len(given_up), session.scalar(failed) or 0


def first_failed(session: Session, job: str) -> str:
    """The first of the shards that failed for good, with its records and its last error."""
    query = select(ShardRow).where(ShardRow.job == job, ShardRow.state == "failed").order_by(ShardRow.index).limit(1)
    shard = session.scalars(query).one()
    return f"the first is {_named(shard)}: {shard.error}"


def _named(shard: ShardRow) -> str:
    return f"shard {shard.index} (records {shard.start} to {shard.stop - 1})"


def tolerated(row: JobRow) -> int:
    """How many shards may fail for good."""
    return int(load_object(row.spec).get("run", {}).get("max_failed_shards", 0))


def hopeless(session: Session, row: JobRow) -> bool:
    """Whether members fail again and again, more often than they finish a shard."""
    of_attempt = (MemberRow.job == row.id, MemberRow.attempt == row.attempt)
    failures = int(session.scalar(select(func.sum(MemberRow.failures)).where(*of_attempt)) or 0)
    if failures < row.max_attempts:
        return False
    mine = select(MemberRow.worker).where(*of_attempt)
    done = select(ShardRow.index).where(ShardRow.job == row.id, ShardRow.state == "done", ShardRow.worker.in_(mine))
    # The last ones first: the others may be of earlier attempts.
    enough = done.order_by(ShardRow.index.desc()).limit(failures).subquery()
    return failures > (session.scalar(select(func.count()).select_from(enough)) or 0)


def enter(session: Session, job: Job, device: str, software: Software, now: float) -> None:
    """The job's worker becomes a member, perhaps again."""
    row = session.get(MemberRow, (job.id, job.attempt, str(job.worker)))
    if row is None:
        row = MemberRow(job=job.id, attempt=job.attempt, worker=str(job.worker), records_done=0, busy_s=0.0, failures=0)
        session.add(row)
    row.device, row.joined_at, row.moved_at, row.left_at, row.phase = device, now, now, None, None
    row.software = dump(dict(software))
    session.flush()


def note_change(session: Session, job: Job, software: Software, now: float) -> None:
    """The job goes on from finished shards: an event says so if an earlier attempt made them with other software."""
    before = select(MemberRow.software).where(MemberRow.job == job.id, MemberRow.attempt < job.attempt)
    last = session.scalar(before.order_by(MemberRow.attempt.desc(), MemberRow.joined_at).limit(1))
    different = misfit(load_object(last), expected=software) if last is not None else None
    if different is not None:
        text = f"goes on from shards that an earlier attempt finished with other versions: {different}"
        record_event(session, "member", text, now=now, job=job.id, attempt=job.attempt)


def me(job: Job) -> tuple[ColumnElement[bool], ...]:
    """The row of this member."""
    return MemberRow.job == job.id, MemberRow.attempt == job.attempt, MemberRow.worker == job.worker


def active(session: Session, job: Job) -> int:
    """How many members work on the job."""
    return session.scalar(select(func.count()).where(*_working(job))) or 0


def is_active(session: Session, job: Job) -> bool:
    """Whether this member works on the job."""
    mine = select(MemberRow.worker).where(*_working(job), MemberRow.worker == job.worker)
    return session.scalar(mine) is not None


def first_active(session: Session, job: Job) -> tuple[str, str]:
    """The worker and the device of the member that joined first."""
    query = select(MemberRow.worker, MemberRow.device).where(*_working(job))
    worker, device = session.execute(query.order_by(MemberRow.joined_at, MemberRow.worker).limit(1)).one()
    return worker, device


def _working(job: Job) -> tuple[ColumnElement[bool], ...]:
    return MemberRow.job == job.id, MemberRow.attempt == job.attempt, MemberRow.left_at.is_(None)
