"""The messages of the stream, in the form of server-sent events.

hello       id; {"last_seq"}: the first one. What follows has happened after this event.
event       id; {"seq", "at", "job", "attempt", "kind", "message", "data"}: one event of the store, as `show` prints it.
progress    {"jobs": [{...}], "counts": {...}}: all running jobs, as `views.jobs.progress_row` has them, and the number
            of jobs by state. At most once a second, and only if anything in it changed. Not numbered, so a page that
            comes back gets the newest one only.
beat        {}: nothing has happened. A page that hears nothing for some such times has lost the server, though its
            connection may look alive. Not numbered.
reset       id; {"last_seq"}: events are missing, because they were pruned or the database is another one: read it anew.

The `id` is the event's number, `seq`. A browser that comes back sends the last one as `Last-Event-ID`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nimble_jobs.job import Event
from nimble_jobs.store.records import dump
from nimble_jobs.views.jobs import event_json

RETRY_MS = 2000  # after this time a page that lost the stream asks again


def hello(last_seq: int) -> bytes:
    return f"retry: {RETRY_MS}\n".encode() + _message("hello", {"last_seq": last_seq}, number=last_seq)


def reset(last_seq: int) -> bytes:
    return _message("reset", {"last_seq": last_seq}, number=last_seq)


def happened(event: Event) -> bytes:
    value = {"seq": event.seq, "job": event.job_id} | event_json(event)
    return _message("event", value, number=event.seq)


def progress(jobs: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> bytes:
    return _message("progress", {"jobs": list(jobs), "counts": dict(counts)})


def beat() -> bytes:
    return _message("beat", {})


def _message(name: str, value: object, *, number: int | None = None) -> bytes:
    """JSON has no line feeds, which would end a field."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {name}\ndata: {dump(value)}\n\n".encode()
