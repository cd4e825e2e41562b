"""The csv format. The first line names the columns. Small files are held in memory, large ones are read in blocks."""

from __future__ import annotations

import csv
import io
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from nimble_jobs.data.blocks import BLOCK_BYTES, Layout
from nimble_jobs.data.csv_blocks import lines_of, open_large
from nimble_jobs.data.csv_cells import Cells, is_number, with_rows
from nimble_jobs.data.source import record_of
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import TableSource, check_columns
from nimble_jobs.errors import DataError
from nimble_jobs.regular import name_of, open_regular
from nimble_jobs.spec.model import InputSpec

WHOLE_BYTES = 64 << 20  # a file up to this size is read whole, and its numbers stay in memory


def open_csv(spec: InputSpec, path: Path) -> TableSource:
    """Rows of one CSV file (UTF-8, comma). Cells that are no numbers, and lines of another length, are bad records.

    Columns that hold whole numbers only stay whole; transform.scale: 1 makes them float32.
    """
    stamp = Stamp.of(path)
    try:
        known = _header(path)
        names, extra = check_columns(spec, path, known)
        if stamp.size > WHOLE_BYTES:
            return open_large(spec, path, stamp, known=known, names=names, extra=extra)
        bad: dict[int, str] = {}
        try:
            table = _read(path, names, extra, spec.fields.id, bad)
        except pa.ArrowInvalid:  # a cell far down is no number, where those above it were
            bad.clear()
            table = _read(path, names, extra, spec.fields.id, bad, text=True)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read ({e}); expected a .csv file with a header line") from e
    for name in names:
        i = table.schema.get_field_index(name)
        _refuse_text(table.column(i), f"{path}: input.fields.x: column {name!r}")
        numbers = _numbers(table.column(i), name, bad)
        table = table.set_column(i, name, numbers)
    x = table.select(names)
    step = max(1, BLOCK_BYTES // (8 * len(names)))
    starts = np.array([*range(0, table.num_rows, step), table.num_rows], dtype=np.int64)
    layout = Layout(starts=starts, chains=np.arange(len(starts) - 1), block_bytes=BLOCK_BYTES)
    return TableSource(
        spec,
        stamp,
        names=names,
        schema=x.schema,
        layout=layout,
        read=lambda number: x.slice(int(layout.starts[number]), step),
        extra=table.select(extra),
        bad=bad,
        line=_Lines(path, stamp, table.num_rows),
    )


class _Lines:
    """Where each record begins: FILE:LINE. The file is read for this once, when the first bad record asks."""

    def __init__(self, path: Path, stamp: Stamp, total: int) -> None:
        self._path = path
        self._stamp = stamp
        self._total = total

    def __call__(self, index: int) -> str:
        known = len(self._lines) == self._total
        return f"{self._path}:{self._lines[index]}" if known else record_of(self._path, index)

    @cached_property
    def _lines(self) -> np.ndarray:
        """The line of each record, int64; empty where the file cannot be told apart into the records that were read."""
        try:
            self._stamp.check()
            with io.TextIOWrapper(open_regular(self._path), encoding="utf-8-sig", errors="replace", newline="") as file:
                return np.array(lines_of(file, 0)[1:], dtype=np.int64)  # without the header
        except (DataError, OSError, csv.Error):
            return np.empty(0, dtype=np.int64)


def _header(path: Path) -> list[str]:
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as e:
        raise DataError(f"{path}: the first line cannot be read ({e}); expected column names in UTF-8") from e
    if not names:
        raise DataError(f"{path}: is empty; expected a header line and records")
    return names


def _read(
    path: Path, names: list[str], extra: list[str], id_column: str | None, bad: dict[int, str], *, text: bool = False
) -> pa.Table:
    """The wanted columns, with an empty row in the place of each line that has too few or too many cells."""

    def odd(row: Any) -> str:
        bad[row.number - 2] = (
            f"line has {row.actual_columns} cells; expected {row.expected_columns}"  # row 1 is the header
        )
        return "skip"

    as_text = {*extra, *names} if text else set(extra)  # ids keep leading zeros, labels are told apart later
    with open_regular(path) as file:
        table = pacsv.read_csv(
            name_of(file),
            read_options=pacsv.ReadOptions(use_threads=False),  # else rows have no number
            parse_options=pacsv.ParseOptions(newlines_in_values=True, invalid_row_handler=odd),
            convert_options=pacsv.ConvertOptions(
                include_columns=[*names, *(e for e in extra if e not in names)],
                column_types=dict.fromkeys(as_text, pa.string()),
            ),
        )
    if not bad:
        return table
    table = with_rows(table, bad)
    if id_column is not None:
        i = table.schema.get_field_index(id_column)
        ids = [f"row-{n}" if n in bad else v for n, v in enumerate(table.column(i).to_pylist())]
        table = table.set_column(i, id_column, pa.array(ids, type=pa.string()))
    return table


def _refuse_text(column: pa.ChunkedArray, where: str) -> None:
    """Raises DataError for a column of text: one none of whose cells is a number."""
    if not pa.types.is_string(column.type):
        return
    cells = [cell for cell in column.to_pylist() if cell and cell.strip()]
    if cells and not any(map(is_number, cells)):
        raise DataError(f"{where}: holds text, {cells[0][:40]!r} for instance; expected numbers")


def _numbers(column: pa.ChunkedArray, name: str, bad: dict[int, str]) -> pa.ChunkedArray:
    """A column of text as numbers; what is none becomes empty and its record bad. Other columns as they are."""
    if pa.types.is_null(column.type):
        return column.cast(pa.float64())
    if not pa.types.is_string(column.type):
        return column
    cells = Cells.of(column, name)
    for i, reason in cells.bad.items():
        bad.setdefault(i, reason)
    return cells.values if isinstance(cells.values, pa.ChunkedArray) else pa.chunked_array([cells.values])
