"""Checks the five fields of an expression, one by one, before any library reads them.

They may hold what Debian's crontab(5) allows, and `L`, `LW`, `5L` and `MON#2` for the last or the nth day of a month.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nimble_jobs.ticks.errors import BadExpression

NAMED = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@weekly": "0 0 * * 0", "@monthly": "0 0 1 * *"}
EXPECTED = f"five fields (minute, hour, day of month, month, day of week), or {', '.join(NAMED)}"
_INSTEAD = {"@midnight": "@daily", "@yearly": "'0 0 1 1 *'", "@annually": "'0 0 1 1 *'"}
_LONGEST = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One of the five fields, with its range and the names of its numbers."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()  # of the numbers from `low` on

    @property
    def allowed(self) -> str:
        """The numbers and names that the field takes."""
        names = f" or {self.names[0]}-{self.names[-1]}" if self.names else ""
        return f"{self.low}-{self.high}{names}"


MINUTE = Field(name="minute", low=0, high=59)
HOUR = Field(name="hour", low=0, high=23)
DAY = Field(name="day of month", low=1, high=31)
MONTH = Field(
    name="month", low=1, high=12,
    names=("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"),
)  # fmt: skip
WEEKDAY = Field(name="day of week", low=0, high=7, names=("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))
FIELDS = (MINUTE, HOUR, DAY, MONTH, WEEKDAY)


def normalise(text: str) -> str:
    """Five fields of numbers, stars, steps, `L` and `#`, as cronsim reads them.

    Raises BadExpression naming the field, what was found in it and what it may hold.
    """
    if len(text) > _LONGEST or not text.isprintable():
        raise BadExpression(f"found {text[:40]!a}", f"at most {_LONGEST} printable characters")
    if text.strip().startswith("@"):
        return _named(text.strip())
    parts = text.upper().split()
    if len(parts) != len(FIELDS):
        seconds = ", and there is none for seconds" if len(parts) == 6 else ""
        count = "an empty text" if not parts else f"{len(parts)} field{'s' * (len(parts) != 1)}{seconds}"
        raise BadExpression(f"found {count} in {text!r}" if parts else f"found {count}", EXPECTED)
    return " ".join(_field(field, part) for field, part in zip(FIELDS, parts, strict=True))


def _named(text: str) -> str:
    if text.lower() in NAMED:
        return NAMED[text.lower()]
    instead = _INSTEAD.get(text.lower())
    raise BadExpression(f"found {text!r}", instead or EXPECTED)


def _field(field: Field, part: str) -> str:
    terms = part.split(",")
    if "*" in terms and len(terms) > 1:
        raise _bad(field, part, "* alone, or a list without it")
    return ",".join(_term(field, term, part) for term in terms)


def _term(field: Field, term: str, part: str) -> str:
    if field is DAY and term in ("L", "LW"):
        return term
    if field is WEEKDAY and (nth := re.fullmatch(r"(\w+?)(?:#(\w+)|L)", term)) and "-" not in term:
        return _of_month(nth[1], nth[2], term, part)
    span, slash, step_text = term.partition("/")
    step = _step(field, step_text, part) if slash else ""
    if span == "*":
        return f"*{step}"
    first, dash, last = span.partition("-")
    low = _number(field, first, part)
    if not dash:
        if slash:
            raise _bad(field, part, f"a range before the step, such as {low}-{field.high}{step}")
        return str(low)
    high = 7 if field is WEEKDAY and last == "SUN" else _number(field, last, part)
    if high < low:
        raise BadExpression(
            f"{field.name}: found {term!r}, a range that runs backwards",
            f"two ranges, such as {first}-{field.high},{field.low}-{last}" if field is not WEEKDAY else "two ranges",
        )
    # A step after a single number would mean up to the end to cronsim.
    return f"{low}-{high}{step}" if low < high else str(low)


def _of_month(day: str, nth: str | None, term: str, part: str) -> str:
    """`5L`, `FRIL`, `FRI#2`: the last, or the nth, such day of a month."""
    number = _number(WEEKDAY, day, part)
    if nth is None:
        return f"{number}L"
    if not (nth.isascii() and nth.isdigit() and 1 <= int(nth) <= 5):
        raise BadExpression(f"{WEEKDAY.name}: found {term!r}", f"# with a number from 1 to 5, such as {day}#2")
    return f"{number}#{int(nth)}"


def _step(field: Field, text: str, part: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise _bad(field, part, "a whole number after /")
    step, widest = int(text), field.high - field.low
    if not 1 <= step <= widest:
        raise BadExpression(f"{field.name}: found the step {step} in {part!r}", f"a step from 1 to {widest}")
    return f"/{step}"


def _number(field: Field, text: str, part: str) -> int:
    if text in field.names:
        return field.low + field.names.index(text)
    if text.isascii() and text.isdigit() and len(text) <= 4:
        if field.low <= int(text) <= field.high:
            return int(text)
        raise BadExpression(f"{field.name}: found {int(text)} in {part!r}", field.allowed)
    raise _bad(field, part)


def _bad(field: Field, part: str, expected: str = "") -> BadExpression:
    return BadExpression(f"{field.name}: found {part!r}", expected or f"*, {field.allowed}, a list, a range or a step")
