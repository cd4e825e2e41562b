"""Rows as frozen records, and the one JSON form in which values are stored."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from nimble_jobs.errors import Damaged
from nimble_jobs.job import Attempt, BadKind, Event, Job, JobState, When
from nimble_jobs.schedule import Schedule
from nimble_jobs.store.tables import AttemptRow, EventRow, JobRow
from nimble_jobs.store.words import plain, words


class ScheduleState(StrEnum):
    """Whether a stored schedule can be used."""

    READY = "ready"
    STALE = "stale"  # written by another version of our format
    QUARANTINED = "quarantined"  # damaged, or its results differed from eager


@dataclass(frozen=True, kw_only=True, order=True)
class ArtifactRef:
    """An artifact that a schedule needs in order to load."""

    name: str  # its SHA-256
    kind: str  # constant | kernels (their machine code)
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """Facts about a stored schedule, without the schedule itself. Times are Unix seconds."""

    key: str
    parts: dict[str, str]  # every part of the key, readable
    sha256: str  # over the schedule's JSON, the parts, the measurements and the names of the artifacts
    model: str
    device: str
    input: str
    dtype: str
    mode: str
    streams: int
    syncs: int
    replay_us: float
    eager_us: float
    runs: str  # schedule | eager: the faster of the two
    bytes: int  # bytes on disk, including its artifacts
    hits: int  # stored and resident ones
    resident_hits: int
    created_at: float
    last_used_at: float
    build_s: float  # seconds of the search
    provenance: dict[str, str]  # version and commit of this package, Python, host
    state: ScheduleState
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class StoredSchedule(ScheduleEntry):
    """A stored schedule whose digest was just verified."""

    text: str  # canonical JSON
    artifacts: tuple[ArtifactRef, ...]

    def load(self) -> Schedule:
        """Parse the schedule. Raises Damaged if the text is not one."""
        try:
            return Schedule.from_json(self.text)
        except ValueError as e:
            raise Damaged(f"schedule {self.key}: {e}") from e


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A process that holds a worker lock. `pid` is 0 if its info file cannot be read."""

    id: str
    pid: int
    device: str
    started_at: float
    status: str
    info: dict[str, Any]  # everything that the worker wrote


def dump(value: Any) -> str:
    """Canonical JSON. Other values become plain numbers, texts, or null (non-finite numbers)."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def sha256(text: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item"):  # a NumPy or torch scalar
        return _finite(value.item())
    return str(value)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {str(k): _finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
        case _:
            return value


def load_object(text: str) -> dict[str, Any]:
    """A stored JSON object; empty if damaged, so that listings still work. `Store.check` reports such rows."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}


def load_list(text: str) -> tuple[str, ...]:
    """A stored JSON list of texts; empty if damaged."""
    if text == "[]":  # most are
        return ()
    try:
        value = json.loads(text)
    except (ValueError, TypeError):
        return ()
    return tuple(str(v) for v in value) if isinstance(value, list) else ()


def schedule_columns(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Columns for a job's schedule: the whole JSON, and the fields that listings use."""
    hit, runs = schedule.get("hit"), schedule.get("runs")
    return {
        "schedule": dump(plain(schedule)),
        "hit": None if hit is None else str(hit),
        "runs": None if runs is None else str(runs),
    }


def timings_columns(timings: Mapping[str, Any]) -> dict[str, Any]:
    """Columns for a job's timings: the whole JSON, and the fields that listings use."""
    rate = timings.get("records_per_s")
    rate = float(rate) if rate else None
    return {"timings": dump(plain(timings)), "rate": rate if rate is None or math.isfinite(rate) else None}


def output_path(spec: Mapping[str, Any]) -> str | None:
    """A spec's output path; None if it has none."""
    output = spec.get("output")
    path = output.get("path") if isinstance(output, Mapping) else None
    return path if isinstance(path, str) else None


def load_after(text: str) -> dict[str, When]:
    """A job's waits by id, as `dump_after` stored them; empty if damaged."""
    try:
        value = json.loads(text)
        pairs = [item if isinstance(item, list) else [item, When.SUCCESS] for item in value]
        return {str(job): When(when) for job, when in pairs}
    except (ValueError, TypeError):
        return {}


def dump_after(after: Mapping[str, When]) -> str:
    """JSON of a job's waits: an id for success, else the id and the end."""
    return dump([job if when is When.SUCCESS else [job, when.value] for job, when in after.items()])


def job_record(row: JobRow, *, spec: bool = True) -> Job:
    """A row as a record. Raises Damaged if its state is unknown.

    Without `spec` its JSON is not read: the record has no spec and no outputs, and only the fields of schedule and
    timings that listings show.
    """
    try:
        state = JobState(row.state)
    except ValueError as e:
        raise Damaged(f"job {row.id}: {e}") from e
    after = load_after(row.after)
    return Job(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=state,
        priority=row.priority,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        device=row.device,
        foreground=row.foreground,
        key=row.key,
        after=tuple(after),
        after_when=after,
        held=row.held,
        group=row.group_name,
        array=row.array,
        array_index=row.array_index,
        queued_at=row.queued_at,
        urgency=row.urgency,
        attempts_before=row.attempts_before,
        skipped_by=row.skipped_by,
        not_before=row.not_before,
        timeout_s=row.timeout_s,
        cancel_requested=row.cancel_requested,
        worker=row.worker,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        records_done=row.records_done,
        records_total=row.records_total,
        records_bad=row.records_bad,
        phase=row.phase,
        error=row.error,
        traceparent=row.traceparent,
        gpus=row.gpus,
        world_size=row.world_size,
        allow_python=load_list(row.allow_python),
        spec=load_object(row.spec) if spec else {},
        schedule=load_object(row.schedule) if spec else _given(hit=row.hit, runs=row.runs),
        timings=load_object(row.timings) if spec else _given(records_per_s=row.rate),
        outputs=load_object(row.outputs) if spec else {},
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def attempt_record(row: AttemptRow) -> Attempt:
    """A row as a record."""
    return Attempt(
        job_id=row.job,
        number=row.number,
        worker=row.worker,
        started_at=row.started_at,
        finished_at=row.finished_at,
        outcome=row.outcome,
        error=row.error,
        bad_kinds=_load_kinds(row.bad_kinds),
    )


def dump_kinds(kinds: Sequence[BadKind]) -> str:
    """JSON of bad records by kind."""
    return dump([[kind.count, words(kind.reason), words(kind.first)] for kind in kinds])


def _load_kinds(text: str) -> tuple[BadKind, ...]:
    """Bad records by kind; empty if damaged."""
    if text == "[]":  # most are
        return ()
    try:
        return tuple(BadKind(count=count, reason=reason, first=first) for count, reason, first in json.loads(text))
    except (ValueError, TypeError):
        return ()


def event_record(row: EventRow) -> Event:
    """A row as a record."""
    return Event(
        seq=row.seq,
        at=row.at,
        job_id=row.job,
        attempt=row.attempt,
        kind=row.kind,
        message=row.message,
        data=load_object(row.data),
    )
