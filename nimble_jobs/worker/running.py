"""What a supervisor knows of the attempt that its child works on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from nimble_jobs.job import Job


@dataclass
class Running:
    """The attempt that the child works on. Times are of the monotonic clock."""

    job: Job
    deadline: float | None  # after it the child is killed
    kill_at: float | None = None  # set once the job has been cancelled under it
    waits_since: float | None = None  # for a disk or the store; its time does not run meanwhile
    state: tuple[object, ...] = ()  # what the store says of how far it is
    moved_at: float = 0.0  # when that last changed

    def look(self, job: Job) -> None:
        """Take what the store says of the job now."""
        state = (job.phase, job.records_done, job.timings.get("step"))
        if state != self.state:
            self.state, self.moved_at = state, time.monotonic()

    def waits(self, reason: str | None) -> None:
        """It waits, or goes on."""
        now = time.monotonic()
        if reason is not None:
            self.waits_since = self.waits_since or now
        elif self.waits_since is not None:
            if self.deadline is not None:
                self.deadline += now - self.waits_since
            self.waits_since = None
