"""Writes notifications into the outbox, in the transaction of the change that they report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Table, select
from sqlalchemy.orm import Session

from nimble_jobs.errors import SettingsError
from nimble_jobs.job import JobState
from nimble_jobs.store.ids import random_id
from nimble_jobs.store.outbox_table import NoticeRow
from nimble_jobs.store.records import dump, load_object
from nimble_jobs.store.routes import STARTED, Channel, Route, routes
from nimble_jobs.store.tables import EventRow, JobRow

if TYPE_CHECKING:
    from nimble_jobs.settings import Settings

SETTINGS = "settings"  # key of a session's function that gives the configuration
UNROUTED = "unrouted"  # the configuration could not be read; targets are found once it can be
_ID_LENGTH = 12
_ERROR_CHARS = 2000
_LINE_CHARS = 300
_ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.QUARANTINED)
_JOBS = cast(Table, JobRow.__table__).c
# What `EndedJob.of` needs of a row.
TOLD = (_JOBS.id, _JOBS.seq, _JOBS.name, _JOBS.kind, _JOBS.attempt, _JOBS.error, _JOBS.spec, _JOBS.outputs)
_BAD = (JobState.FAILED.value, JobState.QUARANTINED.value)


class NoticeState(StrEnum):
    """The state of a notification."""

    PENDING = "pending"
    SENT = "sent"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One message for one address. Times are Unix seconds."""

    id: str
    event: str
    job_id: str | None
    name: str  # of the job or the timer
    channel: str  # webhook | command | ping | unrouted
    target: str  # an address with its variables unfilled; for a command its words, as a JSON list
    body: dict[str, Any]
    state: NoticeState
    attempts: int  # number of attempts, including the current one while it is leased
    next_at: float  # when it is tried next
    since: float  # start of the attempts
    leased_until: float | None
    created_at: float
    sent_at: float | None
    error: str | None


def notice_record(row: NoticeRow) -> Notice:
    """A row as a record."""
    return Notice(
        id=row.id,
        event=row.event,
        job_id=row.job,
        name=row.name,
        channel=row.channel,
        target=row.target,
        body=load_object(row.body),
        state=NoticeState(row.state),
        attempts=row.attempts,
        next_at=row.next_at,
        since=row.since,
        leased_until=row.leased_until,
        created_at=row.created_at,
        sent_at=row.sent_at,
        error=row.error,
    )


@dataclass(frozen=True, kw_only=True)
class News:
    """A message before its recipients are known."""

    event: str
    name: str  # of the job or the timer
    body: Mapping[str, Any]  # `text`, one line for people, and facts
    job: str | None = None
    better: str | None = None  # an event that replaces this one for targets that want it


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """What a notification says about a job that has just ended."""

    id: str
    seq: int
    name: str
    kind: str
    attempt: int
    error: str | None
    spec: str  # JSON
    outputs: str  # JSON

    @classmethod
    def of(cls, row: Any, *, error: str | None, outputs: str) -> EndedJob:
        """A row with the columns `TOLD`, which may be older than `error` and `outputs`."""
        return cls(
            id=row.id,
            seq=row.seq,
            name=row.name,
            kind=row.kind,
            attempt=row.attempt,
            error=error,
            spec=row.spec,
            outputs=outputs,
        )


def queue(
    session: Session, news: News, found: tuple[Route, ...] | None, notify: Mapping[str, Any] | None, now: float
) -> None:
    """Write news into the transaction, for the addresses that `routes_of` has found for the spec's `notify`."""
    if found is None:
        body = {**news.body, UNROUTED: {"event": news.event, "better": news.better, "notify": notify}}
        _add(session, replace(news, body=body), event=news.event, channel=UNROUTED, target="", now=now)
        return
    _spread(session, news, found, now)


def spread(session: Session, row: NoticeRow, settings: Settings, now: float) -> int:
    """Replace a notification without targets by one for each address. Returns their number."""
    body = load_object(row.body)
    held = body.pop(UNROUTED, {})
    targets = routes(settings.notify, held.get("notify"))
    event = held.get("event", row.event)
    news = News(event=event, better=held.get("better"), name=row.name, body=body, job=row.job)
    count = _spread(session, news, targets, now)
    session.delete(row)
    return count


def queue_end(session: Session, job: EndedJob, to: JobState, now: float) -> None:
    """Write notifications about a job that was just moved to the state `to`. Does nothing if that is not final."""
    if to not in _ENDS:
        return
    notify = load_object(job.spec).get("notify")
    wanted = routes_of(session, notify)
    if wanted == ():
        return
    recovered = to is JobState.SUCCEEDED and (wanted is None or any("recovered" in route.on for route in wanted))
    error = (job.error or "")[:_ERROR_CHARS] or None
    line = " ".join((error or "").split())[:_LINE_CHARS]
    better = "recovered" if recovered and _was_bad(session, job.id, job.seq, job.name) else None
    body = {
        "text": f"{job.name}: {better or to.value}" + (f": {line}" if line else "") + f" (job {job.id})",
        "job": job.id,
        "name": job.name,
        "kind": job.kind,
        "state": to.value,
        "attempt": job.attempt,
        "error": error,
        "output": load_object(job.outputs).get("path"),
        "at": _iso(now),
    }
    news = News(event=to.value, better=better, name=job.name, body=body, job=job.id)
    queue(session, news, wanted, notify, now)


def queue_start(session: Session, job: JobRow, now: float) -> None:
    """Write pings about an attempt that begins."""
    notify = load_object(job.spec).get("notify")
    wanted = routes_of(session, notify)
    if wanted is not None and not any(STARTED in route.on for route in wanted):
        return
    text = f"{job.name}: attempt {job.attempt} starts (job {job.id})"
    body = {"text": text, "job": job.id, "name": job.name, "attempt": job.attempt, "at": _iso(now)}
    queue(session, News(event=STARTED, name=job.name, body=body, job=job.id), wanted, notify, now)


def routes_of(session: Session, notify: Mapping[str, Any] | None) -> tuple[Route, ...] | None:
    """The targets in a spec's `notify` and the configuration; None if the configuration cannot be read."""
    settings: Callable[[], Settings] = session.info[SETTINGS]
    try:
        return routes(settings().notify, notify)
    except SettingsError:
        return None


def _spread(session: Session, news: News, found: tuple[Route, ...], now: float) -> int:
    count = 0
    for route in found:
        event_name = next((event for event in (news.better, news.event) if event in route.on), None)
        if event_name is not None:
            _add(session, news, event=event_name, channel=route.channel, target=route.target, now=now)
            count += 1
    return count


def _add(session: Session, news: News, *, event: str, channel: Channel | str, target: str, now: float) -> None:
    key = random_id(_ID_LENGTH)
    session.add(
        NoticeRow(
            id=key,
            event=event,
            job=news.job,
            name=news.name,
            channel=str(channel),
            target=target,
            body=dump({"id": key, "event": event, **news.body}),
            state=NoticeState.PENDING.value,
            attempts=0,
            next_at=now,
            since=now,
            created_at=now,
        )
    )
    session.flush()


def _was_bad(session: Session, job_id: str, seq: int, name: str) -> bool:
    """Whether this job ended badly before, or the previous job of its name did."""
    own = select(EventRow.seq).where(EventRow.job == job_id, EventRow.kind.in_(_BAD)).limit(1)
    if session.scalar(own) is not None:
        return True
    before = (
        select(JobRow.state)
        .where(JobRow.name == name, JobRow.seq < seq, JobRow.state.in_([state.value for state in _ENDS]))
        .order_by(JobRow.seq.desc())
        .limit(1)
    )
    return session.scalar(before) in _BAD


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
