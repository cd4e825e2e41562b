"""Time zones, read from the tzdata package alone: a tick is the same moment on every machine with the same packages."""

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
    """Every name that tzdata knows."""
    text = importlib.resources.files("tzdata").joinpath("zones").read_text(encoding="utf-8")
    return frozenset(text.split())


@functools.lru_cache(maxsize=256)
def load(name: str) -> ZoneInfo:
    """The rules of a zone. Raises BadZone, with the name that was probably meant."""
    if name not in names():
        same = [known for known in names() if known.lower() == name.lower()]
        near = same or (difflib.get_close_matches(name, sorted(names()), 1, 0.8) if len(name) <= 60 else [])
        raise BadZone(f"found {name[:60]!r}", near[0] if near else EXPECTED)
    source = importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/"))
    with source.open("rb") as stream:
        return ZoneInfo.from_file(stream, key=name)


def local(at: float, zone: ZoneInfo) -> datetime:
    """A moment, in UTC seconds, as the clocks of the zone show it."""
    return datetime.fromtimestamp(at, UTC).astimezone(zone)


def local_text(at: float, zone: str) -> str:
    """A moment by the clocks of a zone, with their distance from UTC: `2026-11-23 02:15 +01:00`. Raises BadZone."""
    moment = local(at, load(zone))
    time = moment.replace(tzinfo=None).isoformat(sep=" ", timespec="minutes" if at % 60 == 0 else "seconds")
    offset = moment.strftime("%z")
    return f"{time} {offset[:3]}:{offset[3:]}"


def offset_s(at: float, zone: ZoneInfo) -> int:
    """How far the zone's clocks are ahead of UTC at a moment, in seconds."""
    offset = local(at, zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def first_change(after: int, until: int, offset: int, zone: ZoneInfo) -> int | None:
    """The first second in (after, until] at which the zone's offset is not `offset`, in seconds; None without one.

    Looks once a day, and then halves the day: offsets that change and change back within a day go unnoticed.
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
    """The first moment, in UTC seconds, at which the zone's clocks show `wall` or more.

    A time of day that is repeated means its first pass. One that is skipped means the moment after the gap.
    """
    early, late = wall.replace(tzinfo=zone, fold=0), wall.replace(tzinfo=zone, fold=1)
    at = int(early.timestamp())
    if local(at, zone).replace(tzinfo=None) == wall:
        return at
    before, behind = (int((moment.utcoffset() or timedelta()).total_seconds()) for moment in (early, late))
    changed = first_change(at - (behind - before), at, before, zone)
    assert changed is not None
    return changed
