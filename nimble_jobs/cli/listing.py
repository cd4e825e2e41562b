"""Filters, sorts, limits and prints rows: as JSON, ids, tables on terminals, or tab-separated text in pipes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nimble_jobs.cli import output
from nimble_jobs.cli.filters import Condition, Keys, known, parse
from nimble_jobs.views.figures import Row

_GAP = 2  # spaces between columns
_NARROWEST = 8  # least width of a flexible column


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows to print, in which order."""

    filters: Sequence[str] = ()
    sort: str | None = None
    limit: int | None = None
    now: float = field(default_factory=time.time)  # Unix seconds; ages are counted from here

    def apply(self, rows: list[Row], keys: Keys) -> list[Row]:
        """The rows that match every filter. Raises UsageError for an unknown key or a senseless condition, even without
        rows.
        """
        return self.chosen(rows, self.conditions(keys), self.sort_key(keys))

    def chosen(self, rows: list[Row], conditions: Sequence[Condition], sort: str | None) -> list[Row]:
        """The rows that match these conditions, sorted and limited."""
        rows = [row for row in rows if all(condition.holds(row.get(condition.key)) for condition in conditions)]
        if sort is not None:
            present = [row for row in rows if row.get(sort) is not None]
            present.sort(key=lambda row: row[sort], reverse=self.descending)
            rows = present + [row for row in rows if row.get(sort) is None]
        return rows[: self.limit]

    def conditions(self, keys: Keys) -> list[Condition]:
        """The parsed conditions. Raises UsageError, as `apply` does."""
        return [parse(condition, keys, self.now) for condition in self.filters]

    def sort_key(self, keys: Keys) -> str | None:
        """The key to sort by, None to keep the order. Raises UsageError."""
        return known(self.sort.lstrip("-"), keys, "--sort") if self.sort else None

    @property
    def descending(self) -> bool:
        return str(self.sort).startswith("-")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    header: str
    cell: Callable[[Row], str]
    style: Callable[[Row], str] | None = None
    justify: Literal["left", "right"] = "left"
    flexible: bool = False  # shrinks, with an ellipsis, on a narrow terminal
    gives_first: bool = False  # least width if it is flexible
    from_width: int = 0  # left out on narrower terminals
    telling: bool = False  # but kept if rows differ in it and there is room


def print_rows(
    rows: list[Row], columns: Sequence[Column], *, id_key: str, json: bool, quiet: bool, empty: str, caption: str = ""
) -> None:
    """Print rows on stdout in the requested form."""
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


def fits(rows: list[Row], columns: Sequence[Column], available: int) -> bool:
    """Whether the columns fit on a terminal of this width without shrinking."""
    return _total(_whole(rows, columns)) <= available


def _table(rows: list[Row], columns: Sequence[Column], caption: str) -> None:
    from rich.table import Table
    from rich.text import Text

    console = output.console()
    shown = _shown(rows, columns, console.width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.caption, table.caption_justify = caption or None, "left"
    for column, width in zip(shown, _widths(rows, shown, console.width), strict=True):
        table.add_column(column.header, justify=column.justify, no_wrap=True, overflow="ellipsis", width=width)
    for row in rows:
        cells = (Text(output.visible(c.cell(row)), style=c.style(row) if c.style else "") for c in shown)
        table.add_row(*cells)
    console.print(table)


def _shown(rows: list[Row], columns: Sequence[Column], available: int) -> list[Column]:
    """The columns for a terminal of this width, and further ones that tell rows apart.

    A further column is shown if there is room for it and no column is cut so short that different rows look alike.
    """
    shown = [column for column in columns if available >= column.from_width]
    for column in columns:
        if column.telling and column not in shown and len({column.cell(row) for row in rows}) > 1:
            more = [each for each in columns if each in shown or each is column]
            widths = _widths(rows, more, available)
            if _total(widths) <= available and all(_tells(rows, *each) for each in zip(more, widths, strict=True)):
                shown = more
    return shown


def _tells(rows: list[Row], column: Column, width: int) -> bool:
    cells = {column.cell(row) for row in rows}
    return len({_cut(cell, width) for cell in cells}) == len(cells)


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _widths(rows: list[Row], columns: Sequence[Column], available: int) -> list[int]:
    """The width of each column's contents. If they do not fit, flexible columns shrink, the widest first."""
    widths = _whole(rows, columns)
    over = _total(widths) - available
    while over > 0:
        wide = [i for i, column in enumerate(columns) if column.flexible and widths[i] > _NARROWEST]
        if not wide:
            break
        wide = [i for i in wide if columns[i].gives_first] or wide
        widths[max(wide, key=widths.__getitem__)] -= 1
        over -= 1
    return widths


def _whole(rows: list[Row], columns: Sequence[Column]) -> list[int]:
    return [max(len(column.header), *(len(column.cell(row)) for row in rows)) for column in columns]
