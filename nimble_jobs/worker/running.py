"""The supervisor's view of the attempt that its child works on, and the decision whether it may go on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from nimble_jobs.job import Job, JobState
from nimble_jobs.spec.units import format_duration
from nimble_jobs.worker.messages import Borrows
from nimble_jobs.worker.settings import CANCEL_GRACE_S, CANCELLED_S, OVERTIME_S


class Verdict(StrEnum):
    """Why the attempt's process must be ended."""

    OVERTIME = "timed out, and does not stop"
    CANCELLED = "cancelled, and does not stop"
    RESTARTED = "its process must be restarted"
    STALLED = "makes no progress"


_GLANCE_S = 2.0  # after a longer gap between two looks, this process itself was stopped


@dataclass
class Running:
    """The attempt that the child works on. Times are of the monotonic clock, and `now` is an argument everywhere."""

    job: Job
    deadline: float | None  # after it the child is killed
    seen: Job | None = None  # as the store had it last
    kill_at: float = math.inf  # moved forward when the job is cancelled
    restart_at: float = math.inf  # moved forward when its process must be replaced
    waits_since: float | None = None  # waits for a disk or the store; its timeout does not run meanwhile
    stall_s: float | None = None  # the child is ended after this long without progress
    still_s: float = 0.0  # how long it has made no progress
    moved_at: float = 0.0  # when the computing thread last made progress
    looked_at: float = 0.0
    borrows: Borrows | None = None  # which other devices of its worker it asked for
    borrows_since: float = 0.0

    @classmethod
    def begin(cls, job: Job, now: float, *, stall_s: float | None = None) -> Running:
        """The child gets `job`'s attempt. `stall_s`: default limit of specs without run.stall; None: no limit."""
        deadline = None if job.timeout_s is None else now + job.timeout_s + OVERTIME_S
        return cls(job=job, deadline=deadline, stall_s=stall_of(job, stall_s), moved_at=now, looked_at=now)

    def glance(self, moved: bool, now: float) -> None:
        """Note whether the child `moved` since the last glance.

        Time without progress counts only while this process was running, not while it was stopped or the machine slept.
        """
        if moved:
            self.still_s, self.moved_at = 0.0, now
        elif self.waits_since is None:
            self.still_s += min(now - self.looked_at, _GLANCE_S)
        self.looked_at = now

    def look(self, job: Job, now: float) -> None:
        """Take the store's current record of the job."""
        self.seen = job
        if job.state is JobState.CANCELLED:
            self.kill_at = min(self.kill_at, now + CANCELLED_S)
        elif job.cancel_requested:
            self.kill_at = min(self.kill_at, now + CANCEL_GRACE_S)
        elif self.job.gpus > 1 and (job.state is not JobState.RUNNING or job.attempt != self.job.attempt):
            self.kill_at = min(self.kill_at, now + CANCEL_GRACE_S)  # others have ended what this member works on

    def borrow(self, wish: Borrows, now: float) -> None:
        """Note which other devices of its worker it needs."""
        self.borrows, self.borrows_since = wish, self.borrows_since or now

    def waits(self, reason: str | None, now: float) -> None:
        """Note that the attempt waits, or goes on."""
        if reason is not None:
            self.waits_since = self.waits_since or now
        elif self.waits_since is not None:
            if self.deadline is not None:
                self.deadline += now - self.waits_since
            self.waits_since = None

    def verdict(self, now: float) -> Verdict | None:
        """Why the attempt must end; None while it may go on."""
        if self.deadline is not None and self.waits_since is None and now > self.deadline:
            return Verdict.OVERTIME
        if now > self.kill_at:
            return Verdict.CANCELLED
        if now > self.restart_at:
            return Verdict.RESTARTED
        if self.stall_s is not None and self.waits_since is None and self.still_s > self.stall_s:
            return Verdict.STALLED
        return None

    def stalled(self, *, stopped: bool = False) -> str:
        """How far it got, in words. `stopped`: a signal had stopped its process."""
        job = self.seen or self.job
        words = f"no progress for {format_duration(self.stall_s or 0.0)} (run.stall) in phase {job.phase or 'start'}"
        if job.records_total is not None:
            words += f", {job.records_done} of {job.records_total} records done"
        return f"{words}; its process was stopped by a signal" if stopped else words


def stall_of(job: Job, default_s: float | None) -> float | None:
    """A job's run.stall in seconds: `default_s` if its spec sets none, None if it says off."""
    given = job.spec.get("run", {}).get("stall")
    return default_s if given is None else None if given == "off" else float(given)
