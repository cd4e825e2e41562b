"""What of `--filter` and `--sort` the database can do, so that `ls` need not look at every job."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any, Literal, cast

from nimble_jobs.cli.filters import Condition, Keys, Kind, number_of, span_of

if TYPE_CHECKING:
    from nimble_jobs.store.listed import Match

_MARGIN_S = 0.002  # rows show times to the millisecond, the database has them whole
_PATTERN = frozenset("*?[")
_TURNED: dict[str, str] = {">": "<", "<": ">", ">=": "<=", "<=": ">="}


def match_of(condition: Condition, keys: Keys, now: float) -> Match | None:
    """The condition for the database; None where it cannot check it."""
    from nimble_jobs.store.listed import COLUMNS, Match

    key, compare, operand = condition.key, condition.compare, condition.operand
    if key not in COLUMNS:
        return None

    def made(compare: str, value: Any, *, exact: bool = True) -> Match:
        return Match(column=key, compare=cast(Literal["="], compare), value=value, exact=exact)

    if operand.lower() == "null" and compare in ("=", "!="):
        return made(compare, None)
    kind = keys[key]
    if isinstance(kind, tuple):
        return made("in" if compare == "=" else "not in", tuple(fnmatch.filter(kind, operand)))
    if kind is Kind.TEXT:
        return None if _PATTERN & set(operand) else made(compare, operand)
    if kind is Kind.NUMBER:
        return made(compare, number_of(key, kind, operand))
    if kind is Kind.TIME and compare in _TURNED:
        at, age = span_of(key, operand, now)
        compare = _TURNED[compare] if age else compare  # longer ago is earlier
        low = compare in (">", ">=")
        return made(">=" if low else "<=", at - _MARGIN_S if low else at + _MARGIN_S, exact=False)
    return None
