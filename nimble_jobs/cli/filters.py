"""Conditions of `--filter`. Each is parsed once, by the type of its key, before any row is read."""

from __future__ import annotations

import difflib
import fnmatch
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from nimble_jobs.errors import UsageError

_UNIT_SUFFIXES = ("_at", "_bytes", "_us", "_s")  # may be left out: created>1d, replay<2ms
_CONDITION = re.compile(r"([A-Za-z_][\w.]*)\s*(!=|>=|<=|=|>|<)\s*(.*)", re.DOTALL)
_TIME_PATTERN = re.compile(r"[0-9T:.Z*?-]+")
_ORDER: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_DAY_S = 86400
_FLAGS = {"yes": True, "true": True, "no": False, "false": False}


class Kind(Enum):
    """The type of a key in the JSON rows; any may be null."""

    TEXT = auto()
    TEXTS = auto()  # a list, matched by its items, or by being empty
    FLAG = auto()  # yes or no
    NUMBER = auto()
    FACTOR = auto()  # 2.5, or 2.5x
    SECONDS = auto()
    MICROSECONDS = auto()
    BYTES = auto()
    TIME = auto()  # ISO 8601 in UTC


Keys = Mapping[str, Kind | tuple[str, ...]]  # a tuple: a text that is one of these


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition on the value of a key."""

    key: str
    compare: str  # =, !=, >, <, >= or <=
    operand: str
    holds: Callable[[Any], bool]


def parse(text: str, keys: Keys, now: float, *, more: Sequence[str] = ()) -> Condition:
    """Read `KEY=VALUE` or another comparison; ages are counted from `now`, Unix seconds. Errors name `more` keys, too.

    Raises UsageError for an unknown key, a value of the wrong type, and a comparison that the type does not have.
    """
    matched = _CONDITION.fullmatch(text.strip())
    if not matched:
        raise UsageError(
            f"--filter: {text!r} is not a condition; expected KEY=VALUE, or !=, >, <, >=, <=; "
            f"KEY is one of {', '.join((*keys, *more))}"
        )
    key, compare, operand = known(matched[1], keys, "--filter", more=more), matched[2], matched[3].strip()

    def condition(holds: Callable[[Any], bool]) -> Condition:
        return Condition(key=key, compare=compare, operand=operand, holds=holds)

    if compare in _ORDER:
        ordered = _ordered(key, keys[key], _ORDER[compare], operand, now)
        return condition(lambda cell: cell is not None and ordered(cell))
    if operand.lower() == "null":
        return condition(lambda cell: (cell is None) == (compare == "="))
    equal = _equal(key, keys[key], operand)
    return Condition(
        key=key,
        compare=compare,
        operand=operand,
        holds=lambda cell: (cell is not None and equal(cell)) == (compare == "="),
    )


def known(key: str, keys: Keys, where: str, *, more: Sequence[str] = ()) -> str:
    """The full name of a key, for instance last_used_at for `used`, or bytes for `size`. Raises UsageError."""
    if key in keys:
        return key
    word = {"used": "last_used", "size": "bytes"}.get(key, key)
    for full in (word, *(word + suffix for suffix in _UNIT_SUFFIXES)):
        if full in keys:
            return full
    allowed = (*keys, *more)
    if key in more:
        raise UsageError(f"{where}: {key} can only be compared with =; expected {key}=VALUE")
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"{where}: unknown key {key!r}; {hint}expected one of {', '.join(allowed)}")


def _ordered(
    key: str, kind: Kind | tuple[str, ...], compare: Callable[[float, float], bool], operand: str, now: float
) -> Callable[[Any], bool]:
    match kind:
        case Kind.TEXT | Kind.TEXTS | Kind.FLAG | tuple():
            raise UsageError(f"--filter: {key} holds text, which has no order; expected {key}=VALUE or {key}!=VALUE")
        case Kind.TIME:
            at, age = span_of(key, operand, now)
            if age:  # used>30d: longer ago than that
                return lambda cell: compare(at, _timestamp(cell))
            return lambda cell: compare(_timestamp(cell), at)
        case _:
            number = number_of(key, kind, operand)
            return lambda cell: compare(cell, number)


def _equal(key: str, kind: Kind | tuple[str, ...], operand: str) -> Callable[[Any], bool]:
    match kind:
        case tuple():
            if not fnmatch.filter(kind, operand):
                raise UsageError(f"--filter: {key}: found {operand!r}; expected one of {', '.join(kind)}")
            return lambda cell: fnmatch.fnmatchcase(str(cell), operand)
        case Kind.TEXT:
            return lambda cell: fnmatch.fnmatchcase(str(cell), operand)
        case Kind.FLAG:
            wanted = flag_of(key, operand)
            return lambda cell: bool(cell) == wanted
        case Kind.TEXTS:
            flag = _FLAGS.get(operand.lower())
            if flag is not None:
                return lambda cell: bool(cell) == flag
            return lambda cell: any(fnmatch.fnmatchcase(str(item), operand) for item in cell)
        case Kind.TIME:
            if "*" in operand and _TIME_PATTERN.fullmatch(operand):
                return lambda cell: fnmatch.fnmatchcase(cell, operand)
            start = _date(key, operand)
            end = start + (0 if ":" in operand else _DAY_S)
            return lambda cell: start <= _timestamp(cell) < end or _timestamp(cell) == start
        case _:
            number = number_of(key, kind, operand)
            return lambda cell: bool(cell == number)


def flag_of(key: str, operand: str) -> bool:
    """True of yes, False of no. Raises UsageError."""
    flag = _FLAGS.get(operand.lower())
    if flag is None:
        raise UsageError(f"--filter: {key}: found {operand!r}; expected yes or no")
    return flag


def number_of(key: str, kind: Kind, operand: str) -> float:
    """A plain number; a duration, a size, a factor for keys that hold such."""
    from nimble_jobs.spec.units import parse_bytes, parse_duration

    try:
        number = float(operand.removesuffix("x").removesuffix("×") if kind is Kind.FACTOR else operand)
    except ValueError:
        number = math.nan
    if math.isfinite(number):
        return number
    try:
        match kind:
            case Kind.BYTES:
                return parse_bytes(operand)
            case Kind.SECONDS:
                return parse_duration(operand)
            case Kind.MICROSECONDS:
                return parse_duration(operand) * 1e6
    except ValueError as e:
        raise UsageError(f"--filter: {key}: {e}") from e
    expected = "a number such as 2 or 2.5x" if kind is Kind.FACTOR else "a number such as 3"
    raise UsageError(f"--filter: {key}: found {operand!r}; expected {expected}")


def span_of(key: str, operand: str, now: float) -> tuple[float, bool]:
    """Unix seconds of a date, or of an age counted from `now`; and whether it is an age. Raises UsageError."""
    age_s = _duration(operand)
    return (_date(key, operand), False) if age_s is None else (now - age_s, True)


def _duration(operand: str) -> float | None:
    """Seconds of a duration with a unit; None for anything else, such as a date."""
    from nimble_jobs.spec.units import parse_duration

    try:
        return parse_duration(operand) if operand[-1:].isalpha() else None
    except ValueError:
        return None


def _date(key: str, operand: str) -> float:
    """Unix seconds of a date or a time, in UTC if it names no zone."""
    try:
        at = datetime.fromisoformat(operand)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as e:
        raise UsageError(
            f"--filter: {key}: found {operand!r}; expected an age such as 30d or a date such as 2026-01-31"
        ) from e


def _timestamp(cell: str) -> float:
    return datetime.fromisoformat(cell).timestamp()
