"""Time zones, read only from the tzdata package, so that a tick is the same moment on every machine."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from nimble_jobs.ticks.errors import BadZone

EXPECTED = "an IANA name such as Europe/Berlin, or UTC"
DAY_S = 86_400


@functools.cache
def names() -> frozenset[str]:
    """The names of all zones in tzdata."""
    text = importlib.resources.files("tzdata").joinpath("zones").read_text(encoding="utf-8")
    return frozenset(text.split())


@functools.lru_cache(maxsize=256)
def load(name: str) -> ZoneInfo:
    """The rules of a zone. Raises BadZone, which suggests the name that was probably meant."""
    if name not in names():
        same = [known for known in names() if known.lower() == name.lower()]
        near = same or (difflib.get_close_matches(name, sorted(names()), 1, 0.8) if len(name) <= 60 else [])
        raise BadZone(f"found {name[:60]!r}", near[0] if near else EXPECTED)
    source = importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/"))
    with source.open("rb") as stream:
        return ZoneInfo.from_file(stream, key=name)


def local(at: float, zone: ZoneInfo) -> datetime:
    """A moment, given in UTC seconds, as local time of the zone."""
    return datetime.fromtimestamp(at, UTC).astimezone(zone)


def local_text(at: float, zone: str) -> str:
    """A moment as local time with its UTC offset: `2026-11-23 02:15 +01:00`. Raises BadZone."""
    moment = local(at, load(zone))
    time = moment.replace(tzinfo=None).isoformat(sep=" ", timespec="minutes" if at % 60 == 0 else "seconds")
    offset = moment.strftime("%z")
    return f"{time} {offset[:3]}:{offset[3:]}"


def offset_s(at: float, zone: ZoneInfo) -> int:
    """The zone's UTC offset at a moment, in seconds."""
    offset = local(at, zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def first_change(after: int, until: int, offset: int, zone: ZoneInfo) -> int | None:
    """The first second in (after, until] when the zone's UTC offset is not `offset`; None if there is none.

    Looks once a day, then bisects that day. An offset that changes and changes back within a day goes unnoticed.
    """
    while after < until:
        probe = min(after + DAY_S, until)
        if offset_s(probe, zone) != offset:
            low, high = after, probe
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset_s(middle, zone) == offset else (low, middle)
            return high
        after = probe
    return None


def utc_of(wall: datetime, zone: ZoneInfo) -> int:
    """The first moment, in UTC seconds, when the zone's clocks show `wall` or later.

    For a repeated time that is its first occurrence; for a skipped time, the moment after the gap.
    """
    early, late = wall.replace(tzinfo=zone, fold=0), wall.replace(tzinfo=zone, fold=1)
    at = int(early.timestamp())
    if local(at, zone).replace(tzinfo=None) == wall:
        return at
    before, behind = (int((moment.utcoffset() or timedelta()).total_seconds()) for moment in (early, late))
    changed = first_change(at - (behind - before), at, before, zone)
    assert changed is not None
    return changed
