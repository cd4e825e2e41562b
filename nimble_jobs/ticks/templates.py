"""Fills in `{{ tick:%Y-%m-%d }}` and `{{ previous_tick:%Y-%m-%d }}`. Nothing else is a template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from nimble_jobs.ticks import zones
from nimble_jobs.ticks.errors import BadTemplate

NAMES = ("tick", "previous_tick")
CODES = {
    "%Y": "year", "%y": "year of the century", "%m": "month", "%d": "day", "%H": "hour", "%M": "minute",
    "%S": "second", "%j": "day of the year", "%G": "year of the week", "%V": "week", "%u": "day of the week",
    "%z": "distance from UTC", "%%": "a percent sign",
}  # fmt: skip
"""Only codes that give numbers, so that the result does not depend on a locale."""
EXPECTED = "{{ tick:%Y-%m-%d }} or {{ previous_tick:%Y-%m-%d }}"

_BRACES = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_INSIDE = re.compile(r"\s*([A-Za-z_]*)\s*(?::(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """One template in a text."""

    text: str  # with its braces
    name: str  # tick | previous_tick
    format: str  # a strftime format that uses only CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A text split into its templates and the texts around them."""

    texts: tuple[str, ...]
    placeholders: tuple[Placeholder, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Split a text. Raises BadTemplate for braces that are no template."""
        rest = _BRACES.sub("", text)
        if "{{" in rest or "}}" in rest:
            raise BadTemplate(f"found {'{{' if '{{' in rest else '}}'} without its pair", EXPECTED)
        parts = _BRACES.split(text)
        inside = zip(_BRACES.finditer(text), parts[1::2], strict=True)
        return cls(texts=tuple(parts[::2]), placeholders=tuple(_placeholder(found[0], part) for found, part in inside))

    def fill(self, tick: int, previous: int | None, zone: ZoneInfo) -> str:
        """The text for a tick. Raises BadTemplate if it needs `previous_tick` and there is none."""
        parts = [self.texts[0]]
        for found, after in zip(self.placeholders, self.texts[1:], strict=True):
            moment = tick if found.name == "tick" else previous
            if moment is None:
                raise BadTemplate(f"{found.text}: there is no tick before", "tick")
            parts += [zones.local(moment, zone).strftime(found.format), after]
        return "".join(parts)


def placeholders(text: str) -> tuple[Placeholder, ...]:
    """The templates in a text, in order. Raises BadTemplate for braces that are no template."""
    return Template.parse(text).placeholders


def render(text: str, *, tick: int, previous: int | None, zone: str) -> str:
    """Fill in a text's templates. `tick` and `previous` are UTC seconds and are written as local times of `zone`.

    Raises BadTemplate, also if the text needs `previous_tick` and there is none, and BadZone.
    """
    return Template.parse(text).fill(tick, previous, zones.load(zone))


def _placeholder(text: str, inside: str) -> Placeholder:
    parsed = _INSIDE.fullmatch(inside)
    if parsed is None or parsed[1] not in NAMES:
        raise BadTemplate(f"found {text[:60]!r}", EXPECTED)
    format_ = (parsed[2] or "").strip()
    if not format_ or not format_.isprintable():
        raise BadTemplate(f"found {text[:60]!r}, which has no format", EXPECTED)
    for code in re.findall(r"%.?", format_):
        if code not in CODES:
            raise BadTemplate(f"found {code!r} in {text[:60]!r}", f"one of {' '.join(CODES)}")
    if "%" not in format_.replace("%%", "") or ".." in format_:
        raise BadTemplate(f"found {text[:60]!r}", EXPECTED)
    return Placeholder(text=text, name=parsed[1], format=format_)
