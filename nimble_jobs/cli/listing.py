"""Rows to be filtered, sorted, cut and printed: as JSON, ids, tables on terminals, tab-separated text in pipes."""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from nimble_jobs.cli import output
from nimble_jobs.errors import UsageError

Row = dict[str, Any]

_GAP = 2  # blanks between columns
_NARROWEST = 8  # of a flexible column
_UNIT_SUFFIXES = ("_at", "_bytes", "_us", "_s")  # may be left out: created>1d, replay<2ms
_CONDITION = re.compile(r"([A-Za-z_][\w.]*)\s*(!=|>=|<=|=|>|<)\s*(.*)", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows to print, in which order."""

    filters: Sequence[str] = ()
    sort: str | None = None
    limit: int | None = None
    now: float = field(default_factory=time.time)  # Unix seconds; ages are counted from here

    def apply(self, rows: list[Row], keys: Sequence[str]) -> list[Row]:
        """The rows that pass every filter. Raises UsageError for a key that rows do not have."""
        for condition in self.filters:
            key, compare, operand = _parse(condition, keys)
            rows = [row for row in rows if self._matches(key, row.get(key), compare, operand)]
        if self.sort:
            key = _known(self.sort.lstrip("-"), keys, "--sort")
            present = [row for row in rows if row.get(key) is not None]
            present.sort(key=lambda row: row[key], reverse=self.sort.startswith("-"))
            rows = present + [row for row in rows if row.get(key) is None]
        return rows[: self.limit]

    def _matches(self, key: str, cell: Any, compare: str, operand: str) -> bool:
        if compare in ("=", "!="):
            return _equal(key, cell, operand) == (compare == "=")
        if cell is None:
            return False
        if isinstance(cell, (int, float)):
            return _ORDER[compare](cell, _number(key, operand))
        age_s = _duration(operand) if key.endswith("_at") else None
        if age_s is not None:  # used>30d: longer ago than that
            return _ORDER[compare](self.now - datetime.fromisoformat(cell).timestamp(), age_s)
        return _ORDER[compare](str(cell), operand)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    header: str
    cell: Callable[[Row], str]
    style: Callable[[Row], str] | None = None
    justify: Literal["left", "right"] = "left"
    flexible: bool = False  # gives way, with an ellipsis, where the terminal is narrow
    from_width: int = 0  # left out on narrower terminals


def print_rows(
    rows: list[Row], columns: Sequence[Column], *, id_key: str, json: bool, quiet: bool, empty: str, caption: str = ""
) -> None:
    """Rows on stdout in the form that was asked for."""
    if json:
        output.emit_json(rows)
    elif quiet:
        for row in rows:
            output.emit(str(row[id_key]))
    elif not rows:
        output.note(empty)
    elif output.on_terminal():
        _table(rows, columns, caption)
    else:
        output.emit("\t".join(column.header for column in columns))
        for row in rows:
            output.emit("\t".join(" ".join(column.cell(row).split()) for column in columns))


def _table(rows: list[Row], columns: Sequence[Column], caption: str) -> None:
    from rich.table import Table
    from rich.text import Text

    console = output.console()
    shown = [column for column in columns if console.width >= column.from_width]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.caption, table.caption_justify = caption or None, "left"
    for column, width in zip(shown, _widths(rows, shown, console.width), strict=True):
        table.add_column(column.header, justify=column.justify, no_wrap=True, overflow="ellipsis", width=width)
    for row in rows:
        cells = (Text(output.visible(c.cell(row)), style=c.style(row) if c.style else "") for c in shown)
        table.add_row(*cells)
    console.print(table)


def _widths(rows: list[Row], columns: Sequence[Column], available: int) -> list[int]:
    """As wide as what each column holds. Where that is too much, flexible ones give way, the widest first."""
    widths = [max(len(column.header), *(len(column.cell(row)) for row in rows)) for column in columns]
    over = sum(widths) + _GAP * (len(widths) - 1) - available
    while over > 0:
        wide = [i for i, column in enumerate(columns) if column.flexible and widths[i] > _NARROWEST]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
        over -= 1
    return widths


def _known(key: str, keys: Sequence[str], where: str) -> str:
    """The key itself, or the one that it is short for: `used` for last_used_at, `size` for bytes."""
    if key in keys:
        return key
    word = {"used": "last_used", "size": "bytes"}.get(key, key)
    for full in (word, *(word + suffix for suffix in _UNIT_SUFFIXES)):
        if full in keys:
            return full
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(keys)}"
    raise UsageError(f"{where}: unknown key {key!r}{hint}")


def _parse(condition: str, keys: Sequence[str]) -> tuple[str, str, str]:
    found = _CONDITION.fullmatch(condition.strip())
    if not found:
        raise UsageError(f"--filter: {condition!r} is not a condition; expected KEY=VALUE, or !=, >, <, >=, <=")
    return _known(found[1], keys, "--filter"), found[2], found[3].strip()


def _equal(key: str, cell: Any, operand: str) -> bool:
    if cell is None or isinstance(cell, bool):
        return operand.lower() == {None: "null", True: "true", False: "false"}[cell]
    if isinstance(cell, (int, float)):
        return bool(cell == _number(key, operand))
    if isinstance(cell, (list, tuple)):
        return operand in [str(item) for item in cell]
    return fnmatch.fnmatchcase(str(cell), operand)


def _number(key: str, operand: str) -> float:
    """A plain number, or a duration or size for keys that hold seconds, microseconds or bytes."""
    from nimble_jobs.spec.units import parse_bytes, parse_duration

    try:
        return float(operand)
    except ValueError:
        pass
    try:
        if key.endswith("bytes"):
            return parse_bytes(operand)
        return parse_duration(operand) * (1e6 if key.endswith("_us") else 1)
    except ValueError as e:
        raise UsageError(f"--filter: {key}: {e}") from e


def _duration(operand: str) -> float | None:
    """Seconds of a duration with a unit; None for anything else, such as a date."""
    from nimble_jobs.spec.units import parse_duration

    try:
        return parse_duration(operand) if operand[-1:].isalpha() else None
    except ValueError:
        return None
