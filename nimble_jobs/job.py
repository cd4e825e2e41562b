"""Jobs, attempts and events as frozen records. They hold no connections; the store fills them, everybody reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nimble_jobs.errors import UsageError


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


class When(StrEnum):
    """Which end of another job a job waits for."""

    SUCCESS = "success"  # it succeeded
    FAILURE = "failure"  # it failed, or was quarantined; a cancelled one did neither
    DONE = "done"  # it ended, however

    def met_by(self, state: JobState) -> bool:
        """Is the wait over, now that the other job is in this state? One that ended otherwise never meets it."""
        match self:
            case When.SUCCESS:
                return state is JobState.SUCCEEDED
            case When.FAILURE:
                return state in (JobState.FAILED, JobState.QUARANTINED)
            case When.DONE:
                return state.final


@dataclass(frozen=True, kw_only=True)
class After:
    """What a job waits for: another job, or each job of an array, by id or name (the newest of that name)."""

    job: str
    when: When = When.SUCCESS

    @classmethod
    def parse(cls, text: str) -> After:
        """Read `JOB` or `JOB:WHEN`. Raises UsageError."""
        job, colon, when = text.partition(":")
        if not job or (colon and when not in list(When)):
            raise UsageError(f"--after: found {text!r}; expected JOB or JOB:WHEN, where WHEN is {', '.join(When)}")
        return cls(job=job, when=When(when) if colon else When.SUCCESS)


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
    after: tuple[str, ...]  # ids of the jobs that it waits for, or waited for
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
    phase: str | None  # what the running attempt does right now: list, load, wait, build, check, run, publish
    error: str | None
    after_when: dict[str, When] = field(default_factory=dict)  # for each id of `after`, the end that it waits for
    held: bool = False  # no worker claims it until it is released
    group: str | None = None  # of `run.group`; the group's row has the limit
    array: str | None = None  # id shared by jobs that were submitted together
    array_index: int | None = None  # its place among them, from 0
    queued_at: float = 0.0  # its age counts from here: its submission, or the last `retry`
    urgency: int = 0  # the highest priority of the job itself and of all that wait for it
    attempts_before: int = 0  # attempts up to this number were before the last `retry`; they count no more
    skipped_by: str | None = None  # id of the job whose end made its wait impossible
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
