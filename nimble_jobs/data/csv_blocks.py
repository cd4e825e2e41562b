"""Large CSV files. One pass collects blocks, types, ids and labels; the numbers are read again in blocks when needed.

A column has one type for the whole file. Records, bad records and messages are the same as for a file read whole.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from nimble_jobs import moves
from nimble_jobs.data.blocks import Layout
from nimble_jobs.data.csv_cells import Cells, Text, as_text, is_number, is_text, parse
from nimble_jobs.data.csv_cuts import Cut, cuts
from nimble_jobs.data.source import Source, record_of
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import OpenTable
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import mapped, usable_cores
from nimble_jobs.spec.model import InputSpec

# The order in which pyarrow tries types for a column.
_KINDS = (
    pa.int64(),
    pa.bool_(),
    pa.date32(),
    pa.time32("s"),
    pa.timestamp("s"),
    pa.timestamp("ns"),
    pa.float64(),
    pa.string(),
)
_NUMBERS = {pa.int64(), pa.float64()}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The first pass's results for a block."""

    cut: Cut
    rows: int
    kinds: tuple[pa.DataType, ...]  # types of the columns of x
    extra: pa.Table  # id and label
    odd: dict[int, str]  # rows of the block that are not records


@dataclass(kw_only=True)
class Blocks:
    """The blocks of one file and the types of their columns."""

    stamp: Stamp
    known: Sequence[str]
    names: Sequence[str]
    found: list[Found]
    kinds: dict[str, pa.DataType] = field(default_factory=dict)
    texts: dict[str, Text] = field(default_factory=dict)

    def read(self, number: int) -> pa.Table:
        """The columns of x in a block, with the types of the whole columns. Raises DataError."""
        types = {n: pa.binary() if n in self.texts else kind for n, kind in self.kinds.items()}
        table, _ = self.parsed(number, self.names, types)
        cells = zip(self.names, table.columns, strict=True)
        numbers = [Cells.read(column, self.texts[n], n).values if n in self.texts else column for n, column in cells]
        return pa.table(numbers, names=list(self.names))

    def parsed(
        self, number: int, names: Sequence[str], types: dict[str, pa.DataType]
    ) -> tuple[pa.Table, dict[int, str]]:
        """Some columns of a block. Raises DataError if the file has changed."""
        return parse(self.bytes_of(number), self.known, names, types)

    def bytes_of(self, number: int) -> bytes:
        """The text of a block. Raises DataError if the file has changed."""
        cut = self.found[number].cut
        with self.stamp.open() as file:
            data = os.pread(file.fileno(), cut.nbytes, cut.offset)
        if len(data) != cut.nbytes:
            raise self.stamp.changed()
        return data

    def converts(self, name: str, kind: pa.DataType) -> bool:
        """Whether a whole column can be read as this type."""
        try:
            for number in range(len(self.found)):
                self.parsed(number, [name], {name: kind})
        except pa.ArrowInvalid:
            return False
        return True

    def kind_of(self, name: str, kinds: set[pa.DataType]) -> pa.DataType:
        """The type of a whole column whose blocks have these."""
        kinds = kinds - {pa.null()}
        if not kinds:
            return pa.float64()
        if len(kinds) == 1:
            return next(iter(kinds))
        if kinds <= _NUMBERS:
            return pa.float64()
        for text in (pa.binary(), pa.string()):  # a block of nulls only
            if text in kinds:
                return text
        return next((kind for kind in _KINDS[:-1] if self.converts(name, kind)), pa.string())


def open_large(
    make: Callable[[InputSpec, Stamp, OpenTable], Source],
    spec: InputSpec,
    stamp: Stamp,
    *,
    known: Sequence[str],
    names: Sequence[str],
    extra: Sequence[str],
    plain: Collection[str],
) -> Source:
    """What `make` makes of the rows of a CSV file with the columns `known`. `names` make x; those in `plain` stay text.

    Raises DataError, and what `make` raises.
    """
    path = Path(stamp.path)
    with stamp.open() as file:
        first = mapped(
            lambda part: _first_pass(*part, known, names, extra, plain),
            cuts(file, str(path)),
            threads=usable_cores(),
            depth=2 * usable_cores(),
            name="nimble-read-csv",
        )
        found: list[Found] = []
        for one in first:
            found.append(one)
            moves.made()
    blocks = Blocks(stamp=stamp, known=known, names=names, found=found)
    starts = np.cumsum([0, *(one.rows for one in found)], dtype=np.int64)
    blocks.kinds = {name: blocks.kind_of(name, {one.kinds[i] for one in found}) for i, name in enumerate(names)}
    texts = _texts(blocks, [n for n in names if is_text(blocks.kinds[n]) and n not in plain], starts, path)
    blocks.texts = {name: column.text for name, column in texts.items()}
    blocks.kinds |= {name: text.kind for name, text in blocks.texts.items()}
    most = max((one.rows for one in found), default=1)
    opened = OpenTable(
        names=names,
        schema=pa.schema([(n, blocks.kinds[n]) for n in names]),
        layout=Layout(starts=starts, chains=np.arange(len(found)), block_bytes=8 * most * len(names)),
        read=blocks.read,
        extra=extra_of(found, extra),
        bad=odd_of(found, starts),
        cells={name: column.bad for name, column in texts.items()},
        line=Lines(blocks, starts),
    )
    return make(spec, stamp, opened)


def _first_pass(
    cut: Cut, data: bytes, known: Sequence[str], names: Sequence[str], extra: Sequence[str], plain: Collection[str]
) -> Found:
    types = dict.fromkeys([*plain, *extra], pa.binary())  # so that ids keep leading zeros
    wanted = [*names, *(e for e in extra if e not in names)]
    table, odd = parse(data, known, wanted, types)
    kinds = tuple(table.schema.field(n).type for n in names)
    return Found(cut=cut, rows=table.num_rows, kinds=kinds, extra=table.select(list(extra)), odd=odd)


@dataclass(kw_only=True)
class _Column:
    """The findings about a column of text so far."""

    text: Text = field(default_factory=Text)
    bad: dict[int, str] = field(default_factory=dict)  # records whose cell is no value
    truths: list[int] = field(default_factory=list)  # blocks that alone hold true and false
    sample: str | None = None  # the first cell that is not empty
    any_number: bool = False

    def note(self, read: Cells, first: int) -> None:
        """Keep what is wrong with the cells from record `first` on."""
        self.bad.update({first + i: why for i, why in read.bad.items()})


def _texts(blocks: Blocks, names: list[str], starts: np.ndarray, path: Path) -> dict[str, _Column]:
    """What is found about columns of text. Raises DataError for a column without any number."""
    columns = {name: _Column() for name in names}
    for number in range(len(blocks.found)) if names else ():
        table, _ = blocks.parsed(number, names, dict.fromkeys(names, pa.binary()))
        for name, cells in zip(names, table.columns, strict=True):
            _learn(columns[name], as_text(cells), name, number, int(starts[number]))
        moves.made()
    for name, column in columns.items():
        again = range(len(blocks.found)) if column.text.kind == pa.bool_() else column.truths
        for number in again:  # what a bad cell is depends on the whole column
            table, _ = blocks.parsed(number, [name], {name: pa.binary()})
            column.note(Cells.read(table[name], column.text, name), int(starts[number]))
            moves.made()
        if column.sample is not None and not column.any_number:
            where = f"{path}: input.fields.x: column {name!r}"
            raise DataError(f"{where}: holds text such as {column.sample[:40]!r}; expected numbers")
    return columns


def _learn(column: _Column, cells: pa.ChunkedArray, name: str, number: int, first: int) -> None:
    """Examine the cells of a block, which begins with record `first`."""
    read = Cells.of(cells, name)
    column.text = column.text.also(read.text)
    if read.text.kind == pa.bool_():
        column.truths.append(number)
    else:
        column.note(read, first)
    if not column.any_number:
        held = [cell for cell in cells.to_pylist() if cell and cell.strip()]
        column.sample = column.sample if column.sample is not None else next(iter(held), None)
        column.any_number = any(map(is_number, held))


def extra_of(found: Sequence[Found], extra: Sequence[str]) -> pa.Table:
    """The whole id and label columns."""
    if not found:
        return pa.table({name: pa.array([], pa.binary()) for name in extra})
    return pa.concat_tables([one.extra for one in found])


def odd_of(found: Sequence[Found], starts: np.ndarray) -> dict[int, str]:
    """The lines that are no records, and why, by their position in the file."""
    return {int(start) + i: why for one, start in zip(found, starts, strict=False) for i, why in one.odd.items()}


class Lines:
    """The line of each record, as FILE:LINE. Blocks with bad records are read for this, and the last one is kept."""

    def __init__(self, blocks: Blocks, starts: np.ndarray) -> None:
        self._blocks, self._starts = blocks, starts
        self._last: tuple[int, np.ndarray] | None = None

    def __call__(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        last = self._last
        if last is None or last[0] != number:
            last = self._last = (number, self._lines(number))
        if len(last[1]) != self._blocks.found[number].rows:
            return record_of(self._blocks.stamp.path, index)
        return f"{self._blocks.stamp.path}:{last[1][index - int(self._starts[number])]}"

    def _lines(self, number: int) -> np.ndarray:
        """int64, one line per record. The count differs if csv and pyarrow disagree about the records."""
        begin = self._blocks.found[number].cut.line
        try:
            text = self._blocks.bytes_of(number).decode("utf-8", "replace")
            return np.array(lines_of(io.StringIO(text, newline=""), begin - 1), dtype=np.int64)
        except (DataError, OSError, csv.Error):
            return np.empty(0, dtype=np.int64)


def lines_of(text: io.TextIOBase, before: int) -> list[int]:
    """The line on which each record begins, given the number of lines before the first. Blank lines are skipped."""
    rows = csv.reader(text)
    lines, last = list[int](), 0
    for row in rows:
        if row:
            lines.append(before + last + 1)
        last = rows.line_num
    return lines
