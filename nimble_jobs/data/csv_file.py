"""The csv format. The first line names the columns. Small files are held in memory, large ones are read in blocks."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from nimble_jobs.data.blocks import BLOCK_BYTES, Layout
from nimble_jobs.data.csv_blocks import lines_of, open_large
from nimble_jobs.data.csv_cells import Cells, as_text, is_number, is_text, parse
from nimble_jobs.data.csv_cuts import after_header, check_closed
from nimble_jobs.data.picture_paths import any_path
from nimble_jobs.data.several_columns import IDS, source_of
from nimble_jobs.data.source import Source, record_of
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import OpenTable, check_columns, single_columns
from nimble_jobs.data.text.fixed import AsTokens
from nimble_jobs.errors import DataError, NoRecords
from nimble_jobs.regular import open_regular, read_regular
from nimble_jobs.spec.model import InputSpec

_FIRST_LINES = 1000
WHOLE_BYTES = 64 << 20  # files up to this size are read whole and kept in memory


def open_csv(spec: InputSpec, path: Path, tokens: AsTokens | None = None) -> Source:
    """Rows of one CSV file (UTF-8, comma). A cell that is no value, or a line of wrong length, makes a bad record.

    Columns with only whole numbers stay whole, and those of true and false stay truth values; transform.scale: 1 makes
    them float32. Texts stay for which there are `tokens`, and paths of pictures.

    Raises DataError, and what `tokens` raises.
    """
    stamp = Stamp.of(path)
    try:
        known = header(path)
        names, extra = check_columns(spec, path, known)
        plain, paths = _texts(spec, path, known, tokens)
        extra += [name for name in paths if name not in extra]
        make = partial(source_of, tokens=tokens)
        if stamp.size > WHOLE_BYTES:
            return open_large(make, spec, stamp, known=known, names=names, extra=extra, plain={*plain, *paths})
        table, bad = _read(path, known, names, extra, plain)
    except (pa.ArrowException, OSError) as e:
        # Of a file that is read in blocks, the parser's number of a row counts from the block's beginning.
        said = re.sub(r"Row #\d+: ", "", str(e))
        raise DataError(f"{path}: cannot be read ({said}); expected a .csv file in UTF-8 with a header line") from e
    numbers, cells = [], {}
    for name in names:
        column = table.column(name)
        if name in plain or name in paths:
            numbers.append(column)
            continue
        _refuse_text(column, f"{path}: input.fields.x: column {name!r}")
        column, cells[name] = _numbers(column, name)
        numbers.append(column)
    x = pa.table(numbers, names=names)
    step = max(1, BLOCK_BYTES // (8 * len(names)))
    starts = np.array([*range(0, table.num_rows, step), table.num_rows], dtype=np.int64)
    layout = Layout(starts=starts, chains=np.arange(len(starts) - 1), block_bytes=BLOCK_BYTES)
    opened = OpenTable(
        names=names,
        schema=x.schema,
        layout=layout,
        read=lambda number: x.slice(int(layout.starts[number]), step),
        extra=table.select(extra),
        bad=bad,
        cells=cells,
        line=_Lines(path, stamp, table.num_rows),
    )
    return make(spec, stamp, opened)


class _Lines:
    """The line of each record, as FILE:LINE. The file is read for this once, at the first bad record."""

    def __init__(self, path: Path, stamp: Stamp, total: int) -> None:
        self._path = path
        self._stamp = stamp
        self._total = total

    def __call__(self, index: int) -> str:
        known = len(self._lines) == self._total
        return f"{self._path}:{self._lines[index]}" if known else record_of(self._path, index)

    @cached_property
    def _lines(self) -> np.ndarray:
        """The line of each record, int64; empty if the lines cannot be matched with the records that were read."""
        try:
            self._stamp.check()
            with io.TextIOWrapper(open_regular(self._path), encoding="utf-8-sig", errors="replace", newline="") as file:
                return np.array(lines_of(file, 0)[1:], dtype=np.int64)  # without the header
        except (DataError, OSError, csv.Error):
            return np.empty(0, dtype=np.int64)


def header(path: Path) -> list[str]:
    """The names of the columns. Raises DataError."""
    # Later lines may be in another encoding, which does not matter for the columns' names.
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            names = next(csv.reader(file), [])
            "".join(names).encode()
        except (UnicodeEncodeError, csv.Error) as e:
            reason = e if isinstance(e, csv.Error) else "it is not UTF-8"
            raise DataError(f"{path}: the first line cannot be read ({reason}); expected column names in UTF-8") from e
    if not names:
        raise NoRecords(f"{path}: is empty; expected a header line and records")
    return names


def _texts(
    spec: InputSpec, path: Path, known: list[str], tokens: AsTokens | None
) -> tuple[dict[str, None], dict[str, None]]:
    """The columns whose texts become tokens, and those whose first cell is the path of a picture, by name."""
    columns = {argument: name for argument, name in single_columns(spec).items() if name in known}
    several = spec.fields.arguments is not None
    texts = [name for argument, name in columns.items() if several and tokens is not None and argument == IDS]
    first = _first_cells(path, known, [name for name in columns.values() if name not in texts])
    return dict.fromkeys(texts), dict.fromkeys(name for name, cell in first.items() if any_path(cell))


def _first_cells(path: Path, known: list[str], names: list[str]) -> dict[str, str]:
    """The first cell that is not empty of each column, if it is in one of the first lines."""
    found: dict[str, str] = {}
    at = {name: known.index(name) for name in names}
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", errors="replace", newline="") as file:
        try:
            for row in islice(csv.reader(file), 1, _FIRST_LINES):
                for name in [name for name in at if name not in found]:
                    if len(row) == len(known) and (cell := row[at[name]].strip()):
                        found[name] = cell
                if len(found) == len(at):
                    break
        except csv.Error:  # what is wrong with the line is said by who reads all of them
            pass
    return found


def _read(
    path: Path, known: list[str], names: list[str], extra: list[str], plain: Iterable[str]
) -> tuple[pa.Table, dict[int, str]]:
    """The wanted columns. A line with too few or too many cells becomes an empty row, with a reason."""
    data = read_regular(path)
    check_closed(data, str(path))
    begin = after_header(data)
    if begin == len(data):
        raise NoRecords(f"{path}: no records; expected at least one")
    # So that ids keep leading zeros; labels are interpreted later.
    as_bytes = dict.fromkeys([*plain, *extra], pa.binary())
    wanted = [*names, *(e for e in extra if e not in names)]
    return parse(memoryview(data)[begin:], known, wanted, as_bytes)


def _refuse_text(column: pa.ChunkedArray, where: str) -> None:
    """Raises DataError for a column without a single number."""
    if not is_text(column.type):
        return
    cells = [cell for cell in as_text(column).to_pylist() if cell and cell.strip()]
    if cells and not any(map(is_number, cells)):
        raise DataError(f"{where}: holds text such as {cells[0][:40]!r}; expected numbers")


def _numbers(column: pa.ChunkedArray, name: str) -> tuple[pa.ChunkedArray, dict[int, str]]:
    """A column of text as numbers or truth values, and why cells are none, which become null. Other columns stay."""
    if pa.types.is_null(column.type):
        return column.cast(pa.float64()), {}
    if not is_text(column.type):
        return column, {}
    cells = Cells.of(column, name)
    return cells.values, cells.bad
