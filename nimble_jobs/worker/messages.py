"""What the supervisor and its child say to each other over their pipe. The order to run a job is its `Job` record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Drain:
    """To the child: reach the next safe point, give the job back, then exit."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """From the child: it can run jobs on this device."""

    device: str  # cpu | cuda:N


@dataclass(frozen=True, kw_only=True)
class Refused:
    """From the child: it can never run a job as it was started; trying again is of no use."""

    message: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class Waits:
    """From the child: its job waits for a disk or the store; None when it goes on."""

    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Done:
    """From the child: this attempt is over and the store knows how it ended."""

    job_id: str
    attempt: int
    last: bool = False  # the process ends now, and takes no other job
