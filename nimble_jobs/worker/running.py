"""What a supervisor knows of the attempt that its child works on, and whether it may go on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from nimble_jobs.job import Job, JobState
from nimble_jobs.worker.settings import CANCEL_GRACE_S, CANCELLED_S, OVERTIME_S


class Verdict(StrEnum):
    """Why the process that runs an attempt has to be ended."""

    OVERTIME = "does not stop after its timeout"
    CANCELLED = "cancelled, and does not stop"


@dataclass
class Running:
    """The attempt that the child works on. Times are of the monotonic clock, and `now` is an argument everywhere."""

    job: Job
    deadline: float | None  # after it the child is killed
    kill_at: float = math.inf  # earlier once the job has been cancelled under it
    waits_since: float | None = None  # for a disk or the store; its time does not run meanwhile
    state: tuple[object, ...] = ()  # what the store says of how far it is
    moved_at: float = 0.0  # when that last changed

    @classmethod
    def begin(cls, job: Job, now: float) -> Running:
        """`job`'s attempt is handed to the child."""
        deadline = None if job.timeout_s is None else now + job.timeout_s + OVERTIME_S
        return cls(job=job, deadline=deadline, moved_at=now)

    def look(self, job: Job, now: float) -> None:
        """Take what the store says of the job."""
        state = (job.phase, job.records_done, job.timings.get("step"))
        if state != self.state:
            self.state, self.moved_at = state, now
        if job.state is JobState.CANCELLED:
            self.kill_at = min(self.kill_at, now + CANCELLED_S)
        elif job.cancel_requested:
            self.kill_at = min(self.kill_at, now + CANCEL_GRACE_S)

    def waits(self, reason: str | None, now: float) -> None:
        """It waits, or goes on."""
        if reason is not None:
            self.waits_since = self.waits_since or now
        elif self.waits_since is not None:
            if self.deadline is not None:
                self.deadline += now - self.waits_since
            self.waits_since = None

    def verdict(self, now: float) -> Verdict | None:
        """Why it must not go on; None while it may."""
        if self.deadline is not None and self.waits_since is None and now > self.deadline:
            return Verdict.OVERTIME
        return Verdict.CANCELLED if now > self.kill_at else None
