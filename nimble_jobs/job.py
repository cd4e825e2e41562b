"""Jobs, attempts and events as frozen records without connections. The store makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nimble_jobs.errors import UsageError

ALL_GPUS = 4096  # stands for run.gpus: all; no state folder has more workers


class JobState(StrEnum):
    """The state of a job. The last four are final."""

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
    """How another job must end for a waiting job to run."""

    SUCCESS = "success"  # it succeeded
    FAILURE = "failure"  # it failed or was quarantined; a cancelled job did neither
    DONE = "done"  # it ended in any final state

    def met_by(self, state: JobState) -> bool:
        """Whether a job in `state` fulfils the wait. A job that ended in another way never will."""
        match self:
            case When.SUCCESS:
                return state is JobState.SUCCEEDED
            case When.FAILURE:
                return state in (JobState.FAILED, JobState.QUARANTINED)
            case When.DONE:
                return state.final


@dataclass(frozen=True, kw_only=True)
class After:
    """A wait for another job, or for every job of an array, by id or by name (the newest with that name)."""

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

    MISS = "miss"  # recorded and built for this job
    STORED = "stored"  # read from the store and captured
    RESIDENT = "resident"  # captured already, in this worker


@dataclass(frozen=True, kw_only=True)
class Job:
    """One submitted spec and its state. Times are Unix seconds."""

    id: str
    name: str
    kind: str  # score | finetune
    state: JobState
    priority: int
    attempt: int  # number of the newest attempt, 0 before the first; every write checks it
    max_attempts: int
    device: str  # auto | cpu | cuda | cuda:N
    foreground: bool  # belongs to a `run` command; no worker may claim it
    key: str | None  # idempotency key
    after: tuple[str, ...]  # ids of the jobs that it waits for, or waited for
    not_before: float  # no worker may claim it earlier
    timeout_s: float | None
    cancel_requested: bool
    worker: str | None  # id of the worker that holds it
    created_at: float
    started_at: float | None  # of the newest attempt
    finished_at: float | None
    records_done: int
    records_total: int | None
    records_bad: int
    phase: str | None  # of the running attempt: list, load, wait, build, check, run, publish
    error: str | None
    after_when: dict[str, When] = field(default_factory=dict)  # for each id of `after`, the kind of end it waits for
    held: bool = False  # no worker may claim it before it is released
    group: str | None = None  # of `run.group`; the group's row has the limit
    array: str | None = None  # id shared by jobs that were submitted together
    array_index: int | None = None  # its place among them, from 0
    queued_at: float = 0.0  # when it was submitted or last retried; its age counts from here
    urgency: int = 0  # the highest priority among the job and all jobs that wait for it
    attempts_before: int = 0  # attempts up to this number came before the last `retry` and no longer count
    skipped_by: str | None = None  # id of the job whose end made this job's wait impossible
    traceparent: str | None = None  # W3C trace context: the trace that the job is a part of
    gpus: int = 1  # how many devices may work on it at once
    world_size: int = 1  # how many devices of one machine it needs at once
    joined: bool = False  # the record of a member that did not claim the job itself; `worker` is the member's
    allow_python: tuple[str, ...] = ()  # folders that the submitter allows `python:` sources to come from
    spec: dict[str, Any] = field(default_factory=dict)  # resolved spec as JSON
    schedule: dict[str, Any] = field(default_factory=dict)  # {key, hit, ...}
    timings: dict[str, Any] = field(default_factory=dict)  # {build_s, load_s, run_s, records_per_s, ...}
    outputs: dict[str, Any] = field(default_factory=dict)  # {path, files, records, ...}


@dataclass(frozen=True, kw_only=True)
class BadKind:
    """Bad records that have the same thing wrong with them."""

    reason: str  # of the first of them
    count: int
    first: str  # place of the first of them: FILE:LINE, FILE: record N, or an image's file


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
    bad_kinds: tuple[BadKind, ...] = ()  # of the bad records that were known when it last reported; most frequent first


@dataclass(frozen=True, kw_only=True)
class ShardClaim:
    """A shard that a member of a job is to score: the position of its first record, and the one behind its last."""

    index: int
    start: int
    stop: int
    suspect: bool = False  # a member failed while it held this shard, so it is scored with no other one


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A shard that a member of a job works on."""

    index: int
    records: int
    worker: str
    copied: bool  # another member works on a second copy


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """How many shards of a job are in which state."""

    open: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class Member:
    """A device that works, or worked, on an attempt at a job. Times are Unix seconds."""

    worker: str  # its id
    device: str  # cpu | cuda:N
    joined_at: float
    left_at: float | None  # None while it works
    moved_at: float  # when it joined, began to work after it had held no shard, or finished one
    busy_s: float  # spent on the records done; not on loading, nor without a shard
    phase: str | None
    records_done: int  # in shards that it finished first
    failures: int  # how often it died or failed
    error: str | None  # of the last failure
    software: dict[str, str] = field(default_factory=dict)  # and device, which decide over its numbers


@dataclass(frozen=True, kw_only=True)
class Sealer:
    """An attempt, as it seals manifests."""

    key: str = field(repr=False)  # a secret that only its process and the database know
    output: str  # the job's `output.path`


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A folder that a job publishes. A manifest counts only if it and its folder match all of these fields."""

    token: str  # the manifest's seal, which nobody can guess
    job_id: str
    path: str  # with links resolved
    folder: str  # DEVICE:INODE
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event, kept for `show` and `logs`."""

    seq: int = 0  # grows with each event of the store; the cursor of `logs -f`
    at: float  # Unix seconds
    job_id: str | None
    attempt: int | None
    kind: str  # submitted, claimed, schedule, fallback, shard, requeued, published, failed, ...
    message: str
    data: dict[str, Any] = field(default_factory=dict)
