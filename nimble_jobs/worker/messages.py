"""Messages between the supervisor and its child over their pipe. A `Job` record is the order to run that job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Drain:
    """To the child: reach the next safe point, give the job back, then exit."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """From the child: it can run jobs on this device."""

    device: str  # cpu | cuda:N
    software: dict[str, str]  # what decides over the numbers that it computes
    most_ranks: int = 1  # so many ranks of a training fit on the machine's devices of this type


@dataclass(frozen=True, kw_only=True)
class Refused:
    """From the child: it can never run a job with its arguments, so starting another child would not help."""

    message: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class Waits:
    """From the child: its job waits for a disk or the store; None when it goes on."""

    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Borrows:
    """From the child: its job needs so many of these devices beside its own, until it ends, and no others."""

    devices: tuple[str, ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class Done:
    """From the child: this attempt is over and the store knows how it ended."""

    job_id: str
    attempt: int
    last: bool = False  # whether the process ends now and takes no other job
