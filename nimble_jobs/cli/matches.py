"""The part of `--filter` and `--sort` that the database can do, so that `ls` need not read every job."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any, Literal, cast

from nimble_jobs.cli.filters import Condition, Keys, Kind, flag_of, number_of, span_of

if TYPE_CHECKING:
    from nimble_jobs.store.listed import Match

_SHOWN = 0.001  # rows round times and rates to three digits, the database does not
_DAY_S = 86400.0
_TURNED: dict[str, str] = {">": "<", "<": ">", ">=": "<=", "<=": ">="}
_NUMBERS = (Kind.NUMBER, Kind.SECONDS)
_ROUNDED = ("elapsed_s", "records_per_s")


def matches_of(condition: Condition, keys: Keys, now: float) -> list[Match]:
    """Conditions for the database, all of which must hold; empty if it cannot check the filter."""
    from nimble_jobs.store.listed import COLUMNS, Match

    key, compare, operand = condition.key, condition.compare, condition.operand
    if key not in COLUMNS:
        return []

    def made(compare: str, value: Any, *, exact: bool = True) -> list[Match]:
        return [Match(column=key, compare=cast(Literal["="], compare), value=value, exact=exact)]

    def within(low: float, width: float) -> list[Match]:
        return made(">=", low) + made("<", low + width)

    if operand.lower() == "null" and compare in ("=", "!="):
        return made(compare, None)
    kind = keys[key]
    if isinstance(kind, tuple):
        return made("in" if compare == "=" else "not in", tuple(fnmatch.filter(kind, operand)))
    if kind is Kind.TEXT:
        return made(*_text(compare, operand)) if "[" not in operand else _class(compare, operand, made)
    if kind is Kind.FLAG:
        return made(compare, flag_of(key, operand))
    if kind in _NUMBERS:
        number = number_of(key, cast(Kind, kind), operand)
        if key not in _ROUNDED or compare in _TURNED:
            return made(compare, number)
        return within(number - _SHOWN / 2, _SHOWN) if compare == "=" else []
    if kind is Kind.TIME and compare in _TURNED:
        at, age = span_of(key, operand, now)
        return made(_TURNED[compare] if age else compare, at)  # a larger age is an earlier time
    if kind is Kind.TIME and compare == "=" and "*" not in operand:
        at, age = span_of(key, operand, now)
        return [] if age else within(at, _SHOWN if ":" in operand else _DAY_S)
    return []


def _text(compare: str, operand: str) -> tuple[str, str]:
    if "*" not in operand and "?" not in operand:
        return compare, operand
    return "like" if compare == "=" else "not like", operand


def _class(compare: str, operand: str, made: Any) -> list[Match]:
    """The part of a pattern such as job-[23] before the bracket; the rows are checked against the rest."""
    matches: list[Match] = made("like", operand.partition("[")[0] + "*", exact=False) if compare == "=" else []
    return matches
