"""Values as text: durations, rates, sizes, times. The command line and the dashboard say them in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # a JSON object

_LISTED = 8  # of a list; JSON has all


def iso(at: float | None) -> str | None:
    """Unix seconds as ISO 8601 in UTC, milliseconds kept; equal lengths, so that text order is time order."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def duration(seconds: float | None) -> str:
    """Two units at most: 0.4s, 12s, 3m 20s, 2h 05m, 4d 03h."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def micros(us: float | None) -> str:
    """A replay time with three digits: 85.2µs, 1.24ms."""
    if us is None:
        return "-"
    if us < 1000:
        return f"{us:.1f}µs"
    return f"{us / 1e3:.2f}ms" if us < 1e5 else f"{us / 1e3:.0f}ms"


def size(nbytes: float | None) -> str:
    """Binary units: 512 B, 1.5 MiB."""
    if nbytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def clock(at: float | None) -> str:
    """A time in UTC, to the second."""
    return str(iso(at))[:19].replace("T", " ") + " UTC" if at else "-"


def rate(records_per_s: float | None) -> str:
    """Records a second: 3.4/s, 1,204/s."""
    if not records_per_s:
        return "-"
    return f"{records_per_s:,.1f}/s" if records_per_s < 100 else f"{records_per_s:,.0f}/s"


def speedup(values: dict[str, Any]) -> str:
    """Replay against eager, with the device of the measurement; empty if nothing was measured."""
    replay_us, eager_us = values.get("replay_us"), values.get("eager_us")
    if not replay_us or not eager_us:
        return ""
    device = values.get("device_name") or values.get("device")
    text = f"replay {micros(replay_us)}, eager {micros(eager_us)}, {eager_us / replay_us:.2f}×"
    if values.get("runs") == "eager" and not values.get("fallback"):
        text = f"eager is faster here: {text}"
    return f"{text} on {device}" if device else text


def short_path(path: str) -> str:
    """The path, relative if it is in the current folder."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as dotted names, nulls left out."""
    lines: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += flat(value, f"{prefix}{name}.")
        elif value is not None:
            lines.append((prefix + name, value_text(name, value)))
    return lines


def few(names: Sequence[str]) -> str:
    """The first three items, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def value_text(name: str, value: Any) -> str:
    """A value with the unit in which its name ends."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        shown = [value_text("", item) for item in value[:_LISTED]]
        return ", ".join(shown) + (f" and {len(value) - _LISTED:,} more" if len(value) > _LISTED else "")
    if isinstance(value, (int, float)):
        if name.endswith("_us"):
            return micros(value)
        if name.endswith("bytes"):
            return size(value)
        if name.endswith("per_s"):
            return rate(value)
        if name.endswith("_s"):
            return duration(value)
        return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"
    return str(value)
