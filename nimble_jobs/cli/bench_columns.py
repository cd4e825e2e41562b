"""Columns of the benchmarks' tables: one figure of a row, or all of a row for a pipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nimble_jobs.cli.listing import Column
from nimble_jobs.views.figures import Row


def figure(header: str, name: str, form: Callable[[Any], str] = str, *, from_width: int = 0) -> Column:
    """A figure to the right; a dash if the row has none."""

    def cell(row: Row) -> str:
        return "-" if row.get(name) is None else form(row[name])

    return Column(header=header, cell=cell, justify="right", from_width=from_width)


def text(header: str, name: str, *, from_width: int = 0, flexible: bool = False) -> Column:
    """A word to the left; a dash if the row has none."""

    def cell(row: Row) -> str:
        return "-" if row.get(name) is None else str(row[name])

    return Column(header=header, cell=cell, from_width=from_width, flexible=flexible)


def ratio(value: float) -> str:
    """A speed-up."""
    return f"{value:.2f}"


def raw(name: str) -> Column:
    """A figure as it is, with six digits; nothing if the row has none."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    return Column(header=name, cell=cell)
