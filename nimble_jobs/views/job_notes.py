"""Parts of `show` beside the job's own fields: its tick, values from the configuration, notifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nimble_jobs.views import figures

if TYPE_CHECKING:
    from nimble_jobs.job import Event
    from nimble_jobs.store import Tick
    from nimble_jobs.store.notices import Notice

Lines = list[tuple[str, str]]
_FIELDS = {"run.stall": "limits.stall"}  # a field of specs -> the field of the configuration that gives its default


def settings_of(events: Sequence[Event]) -> dict[str, Any]:
    """Value and origin of each field that the newest attempt took from the configuration."""
    taken = [event.data for event in events if event.kind == "settings"]
    return taken[-1] if taken else {}


def settings_lines(settings: Mapping[str, Any]) -> Lines:
    """The same as lines."""
    return [
        (field, f"{text_of(_FIELDS.get(field, field), each['value'])} ({each['origin']})")
        for field, each in settings.items()
    ]


def tick_json(tick: Tick | None) -> dict[str, Any] | None:
    """The timer's tick for which the job was submitted."""
    if tick is None:
        return None
    return {
        "timer": tick.timer,
        "due": figures.iso(tick.due),
        "kind": tick.kind.value,
        "outcome": tick.outcome.value,
        "reason": tick.reason,
    }


def tick_lines(tick: Tick | None) -> Lines:
    """The same as lines."""
    return [("tick", f"{tick.kind.value}, of {figures.clock(tick.due)}, by the timer {tick.timer}")] if tick else []


def notices_json(notices: Sequence[Notice]) -> list[dict[str, Any]]:
    """Notifications about the job, oldest first."""
    return [
        {
            "id": notice.id,
            "event": notice.event,
            "channel": notice.channel,
            "target": notice.target,
            "state": notice.state.value,
            "attempts": notice.attempts,
            "sent_at": figures.iso(notice.sent_at),
            "error": notice.error,
        }
        for notice in reversed(notices)
    ]


def notice_lines(notices: Sequence[Notice]) -> Lines:
    """The same as lines."""
    lines = []
    for notice in reversed(notices):
        how = notice.state.value.replace("_", " ")
        tries = f", {notice.attempts} attempts" if notice.attempts > 1 else ""
        error = f": {notice.error}" if notice.error else ""
        lines.append((notice.event, f"{notice.channel} {notice.target}: {how}{tries}{error}"))
    return lines


def text_of(field: str, value: Any) -> str:
    """The value of a dotted field, formatted as in the file."""
    from nimble_jobs.spec.units import format_bytes, format_duration

    match value:
        case None:
            return "null"
        case float():
            return format_duration(value)
        case int() if field.endswith(("memory", "size")):
            return format_bytes(value)
        case tuple() | list():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return str(value)
