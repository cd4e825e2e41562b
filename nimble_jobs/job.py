"""Jobs, attempts and events as frozen records. They hold no connections; the store fills them, everybody reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """Where a job stands. The last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


class Hit(StrEnum):
    """How a job came by its schedule."""

    MISS = "miss"  # recorded and built now
    STORED = "stored"  # read from the store, captured now
    RESIDENT = "resident"  # captured already, in this worker


@dataclass(frozen=True, kw_only=True)
class Job:
    """One submitted spec and what has become of it. Times are Unix seconds, UTC."""

    id: str
    name: str
    kind: str  # score | finetune
    state: JobState
    priority: int
    attempt: int  # number of the newest attempt, 0 before the first; the fence of every write
    max_attempts: int
    device: str  # auto | cpu | cuda | cuda:N
    foreground: bool  # belongs to one `run` command; no worker may claim it
    key: str | None  # idempotency key
    after: tuple[str, ...]  # ids that must succeed first
    not_before: float  # claimable from this time on
    timeout_s: float | None
    cancel_requested: bool
    worker: str | None  # id of the worker that holds it
    created_at: float
    started_at: float | None  # of the newest attempt
    finished_at: float | None
    records_done: int
    records_total: int | None
    records_bad: int
    phase: str | None  # what the running attempt does right now: load, wait, build, check, run, publish
    error: str | None
    allow_python: tuple[str, ...] = ()  # folders that the submitter allows `python:` sources to come from
    spec: dict[str, Any] = field(default_factory=dict)  # resolved spec as JSON
    schedule: dict[str, Any] = field(default_factory=dict)  # {key, hit, ...}
    timings: dict[str, Any] = field(default_factory=dict)  # {build_s, load_s, run_s, records_per_s, ...}
    outputs: dict[str, Any] = field(default_factory=dict)  # {path, files, records, ...}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at running a job."""

    job_id: str
    number: int
    worker: str
    started_at: float
    finished_at: float | None
    outcome: str | None  # succeeded, failed, lost, stalled, requeued, cancelled; None while it runs
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A folder that a job publishes. A manifest counts only where it and its folder agree with all of this."""

    token: str  # random; the manifest carries it
    job_id: str
    path: str  # where it is published, links resolved
    folder: str  # DEVICE:INODE
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, kept for `show` and `logs`."""

    seq: int = 0  # grows with each event of the store; the cursor of `logs -f`
    at: float  # Unix seconds
    job_id: str | None
    attempt: int | None
    kind: str  # submitted, claimed, schedule, fallback, shard, requeued, published, failed, ...
    message: str
    data: dict[str, Any] = field(default_factory=dict)
