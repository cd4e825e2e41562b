"""What a workload is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nimble_jobs.data.arriving import Arriving
from nimble_jobs.data.object_inputs import Origin
from nimble_jobs.job import Job, Publication
from nimble_jobs.machine import Software
from nimble_jobs.patience import NONE, Patience
from nimble_jobs.planner import Builders, Residents
from nimble_jobs.seen import Scored
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Membership, Store

if TYPE_CHECKING:
    from nimble_jobs.decoding.pool import Decoders

Event = Callable[[str, str, dict[str, Any]], None]  # kind, message, data


class Stopped(BaseException):
    """The worker wants the job to end. It is not a failure, so it is not an Exception."""


class Stop(StrEnum):
    """What the worker wants a running workload to do. Workloads ask between two batches."""

    GO = "go"
    DRAIN = "drain"  # finish the shard, then return
    CANCEL = "cancel"
    TIMEOUT = "timeout"


class Fetching(Protocol):
    """What fetches an input while the job's own thread, which alone may ask, scores it. See `workloads.fetching`."""

    @property
    def arriving(self) -> Arriving | None:
        """The files, for whoever reads them."""

    def until(self, start: int, stop: int) -> None:
        """Wait for these records. Raises what ended the fetching, also if they are there, and Stopped."""

    def finish(self) -> None:
        """Wait until all objects are there and are those that were listed. Raises as `until` does."""

    def unread(self) -> None:
        """No record is read any more: threads that wait for some are to end. Any thread may say so."""


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Everything that a workload may touch."""

    job: Job
    spec: JobSpec
    device: str  # cpu | cuda:N
    store: Store
    residents: Residents
    stop: Callable[[], Stop]
    # report(phase=..., done=..., total=..., bad=..., schedule=..., timings=...); raises FencedOut
    report: Callable[..., None]
    event: Event
    allowed_python: tuple[Path, ...] = ()
    patience: Patience = NONE  # for writes to the output's disk; raises Stopped if the job is to end
    decoders: Decoders | None = None  # processes that decode pictures for one job after another; None: threads decode
    builders: Builders | None = None  # build schedules beside jobs; None: each job builds its own
    software: Software = field(default_factory=dict)  # of the worker: see `machine`
    membership: Membership | None = None  # if other workers may work on the job too
    memory_bytes: int | None = None  # the worker's --gpu-memory; None: not set
    # Asks the worker for so many of these devices, which other posts of it have; None: it has none.
    borrow: Callable[[Sequence[str], int], None] | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)  # of inputs that were fetched, by their local sources
    fetching: Fetching | None = None  # of `input.source`, if that goes on beside the job


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a workload ended. With `stop` other than GO the job is not finished."""

    stop: Stop = Stop.GO
    outputs: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    publication: Publication | None = None  # of the output, which the store records with the end of the job
    scored: Scored | None = None  # files that count as seen once the job has succeeded; None: nothing is counted
    empty: bool = False  # nothing was new, so nothing was published
    left: bool = False  # this member has left the job, on which others go on
