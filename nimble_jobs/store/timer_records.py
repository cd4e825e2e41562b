"""Timers and ticks as frozen records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from nimble_jobs.errors import Damaged
from nimble_jobs.job import JobState
from nimble_jobs.store.records import load_list, load_object, sha256
from nimble_jobs.store.timer_tables import TickRow, TimerRow


class TimerState(StrEnum):
    """Whether a timer fires."""

    ACTIVE = "active"
    PAUSED = "paused"


class TimerChange(StrEnum):
    """The effect of adding a timer."""

    ADDED = "added"
    EDITED = "edited"
    UNCHANGED = "unchanged"


class TickKind(StrEnum):
    """Why a tick was handled."""

    SCHEDULED = "scheduled"  # it was due
    CATCH_UP = "catch-up"  # it was due while no process ran
    BACKFILL = "backfill"  # requested as part of a range
    MANUAL = "manual"  # requested now


class TickOutcome(StrEnum):
    """The outcome of a tick."""

    SUBMITTED = "submitted"  # its job is `job`
    WAITING = "waiting"  # its job is submitted once another job has ended
    SKIPPED = "skipped"  # the timer's last job had not ended
    MISSED = "missed"  # no process fired it in time
    EMPTY = "empty"  # its job found nothing new
    ERROR = "error"  # its job could not be submitted


@dataclass(frozen=True, kw_only=True)
class Due:
    """A future tick."""

    tick: int  # Unix seconds
    at: float  # when it may fire: the tick with its jitter


@dataclass(frozen=True, kw_only=True)
class Timer:
    """A spec that is submitted at each tick. Times are Unix seconds."""

    name: str
    state: TimerState
    since: float  # when it was added, last edited or last resumed; earlier ticks do not count
    next_due: int | None  # the next tick; None while it is paused, and after its last one
    next_at: float | None  # when that tick may fire
    moved_at: float  # the time by the clock when the three above changed
    gap_from: float | None  # `moved_at` before the last absence
    gap_at: float | None  # the time by the clock at the end of that absence
    created_at: float
    edited_at: float
    file: str  # the spec's file, as it was named
    base: str  # the folder for its relative paths
    allow_python: tuple[str, ...]
    digest: str
    spec: dict[str, Any] = field(default_factory=dict)  # resolved, with its templates unfilled
    damaged: bool = False  # `spec` is damaged


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A moment when a timer was due, and its outcome. Times are Unix seconds."""

    timer: str
    due: int
    until: int | None = None  # the last tick, if this stands for several missed ones
    count: int = 1  # how many ticks it stands for
    kind: TickKind
    outcome: TickOutcome
    job: str | None = None
    reason: str | None = None
    at: float  # when this was decided
    max_running: int | None = None  # for a backfill: how many of its jobs may be open at once


@dataclass(frozen=True, kw_only=True)
class OpenJob:
    """A job of a tick that is queued or running."""

    id: str
    state: JobState
    due: int
    kind: TickKind


def utc(at: float) -> str:
    """A moment in words: `2026-11-22 02:15 UTC`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC" if at % 60 == 0 else "%Y-%m-%d %H:%M:%S UTC")


def timer_digest(spec: str, allow_python: str) -> str:
    """SHA-256 of a timer's spec and allowed folders, both canonical JSON."""
    return sha256(f"{spec}\n{allow_python}")


def timer_record(row: TimerRow) -> Timer:
    """A row as a record. Raises Damaged if its state is unknown."""
    try:
        state = TimerState(row.state)
    except ValueError as e:
        raise Damaged(f"timer {row.name}: {e}") from e
    return Timer(
        name=row.name,
        state=state,
        since=row.since,
        next_due=row.next_due,
        next_at=row.next_at,
        moved_at=row.moved_at,
        gap_from=row.gap_from,
        gap_at=row.gap_at,
        created_at=row.created_at,
        edited_at=row.edited_at,
        file=row.file,
        base=row.base,
        allow_python=load_list(row.allow_python),
        digest=row.digest,
        spec=load_object(row.spec),
        damaged=timer_digest(row.spec, row.allow_python) != row.digest,
    )


def tick_record(row: TickRow) -> Tick:
    """A row as a record. Raises Damaged if its kind or outcome is unknown."""
    try:
        kind, outcome = TickKind(row.kind), TickOutcome(row.outcome)
    except ValueError as e:
        raise Damaged(f"tick {row.due} of {row.timer}: {e}") from e
    return Tick(
        timer=row.timer,
        due=row.due,
        until=row.until,
        count=row.count,
        kind=kind,
        outcome=outcome,
        job=row.job,
        reason=row.reason,
        at=row.at,
        max_running=row.max_running,
    )


def tick_values(tick: Tick) -> dict[str, Any]:
    """The columns of a tick's row."""
    return asdict(tick) | {"kind": tick.kind.value, "outcome": tick.outcome.value}
