"""What a member of a job writes while it works: its own progress, and the job's if it leads."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Unpack

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from nimble_jobs.job import Job, JobState
from nimble_jobs.store.changes import changed, run
from nimble_jobs.store.claims import Progress, progress_columns
from nimble_jobs.store.database import Database
from nimble_jobs.store.jobs import Jobs
from nimble_jobs.store.records import dump_kinds
from nimble_jobs.store.shard_tables import MemberRow
from nimble_jobs.store.shards import Shards
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.transitions import ATTEMPT_CHANGED, MINE_CHANGED, held

_COUNTED = ("records_done", "records_bad")  # which finished shards add to, of all members


class Membership:
    """One member's link to the store, in the place of `Jobs` for an attempt that one worker runs alone."""

    def __init__(self, database: Database, jobs: Jobs, shards: Shards, job: Job) -> None:
        self._db, self._jobs, self._shards, self._job = database, jobs, shards, job
        self._held: set[int] = set()
        self._phase: str | None = None  # as it is stored
        self._lock = threading.Lock()  # guards _held and overtaken
        self.overtaken = False  # others have finished all shards that it holds

    def holds(self, indexes: Collection[int]) -> None:
        """The member works on these shards too."""
        with self._lock:
            self._held.update(indexes)
            self.overtaken = False

    def drops(self, indexes: Collection[int] | None = None) -> None:
        """The member no longer works on these, or on any."""
        with self._lock:
            self._held = set() if indexes is None else self._held.difference(indexes)

    def progress(self, job_id: str, attempt: int, **progress: Unpack[Progress]) -> bool:
        """As `Jobs.progress`, but counts of records come from finished shards.

        A member that does not lead writes nothing but a new phase: a thousand of them would wait for each other.
        """
        phase = progress.get("phase")
        if phase in (None, self._phase):
            query = select(JobRow.worker).where(
                JobRow.id == job_id, JobRow.attempt == attempt, JobRow.state == JobState.RUNNING.value
            )
            leader = self._db.read(lambda session: session.scalar(query))
            if leader != self._job.worker:
                return leader is not None
        reported = self._db.write(lambda session: self._report(session, job_id, attempt, progress))
        self._phase = phase or self._phase
        return reported

    def progress_soon(self, job_id: str, attempt: int, **progress: Unpack[Progress]) -> None:
        """As `progress`, with the next transaction."""
        self._db.write_soon(lambda session: self._report(session, job_id, attempt, progress))

    def cancel_wanted(self, job_id: str, attempt: int) -> bool:
        """As `Jobs.cancel_wanted`. Also looks whether others have overtaken the member."""
        with self._lock:
            holding = set(self._held)
        if holding and self._shards.settled(self._job, holding) == holding:
            with self._lock:
                self.overtaken = holding == self._held
        return self._jobs.cancel_wanted(job_id, attempt)

    def _report(self, session: Session, job_id: str, attempt: int, progress: Progress) -> bool:
        values = {name: value for name, value in progress_columns(progress).items() if name not in _COUNTED}
        mine = {"of_job": job_id, "of_attempt": attempt}
        row = held(session, job_id, attempt)
        if row is None:
            return False
        if (phase := progress.get("phase")) is not None:
            me = (MemberRow.job == job_id, MemberRow.attempt == attempt, MemberRow.worker == self._job.worker)
            changed(session, update(MemberRow).where(*me).values(phase=phase))
        if row.worker == self._job.worker and values:
            run(session, MINE_CHANGED, **mine, **values)
            if progress.get("bad_kinds") is not None:
                run(session, ATTEMPT_CHANGED, **mine, bad_kinds=dump_kinds(progress["bad_kinds"] or ()))
        return True
