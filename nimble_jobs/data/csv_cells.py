"""Parses cells of CSV records with pyarrow, and reads columns of text as numbers or truth values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from nimble_jobs.plural import count

# Cells that count as empty: pyarrow's default without the spellings of NaN, which is a number.
_NULLS = [text for text in pacsv.ConvertOptions().null_values if text.lower().lstrip("-") != "nan"]


def parse(
    data: bytes | memoryview, known: Sequence[str], names: Sequence[str], types: dict[str, pa.DataType]
) -> tuple[pa.Table, dict[int, str]]:
    """The columns `names` of records without a header line. A line with too few or too many cells becomes an empty row,
    with a reason. Raises pa.ArrowInvalid for a cell that does not fit its column's type.
    """
    odd: dict[int, str] = {}

    def note(row: Any) -> str:
        odd[row.number - 1] = f"line has {count(row.actual_columns, 'cell')}; expected {row.expected_columns}"
        return "skip"

    table = pacsv.read_csv(
        pa.BufferReader(data),
        # One block and one thread, because otherwise pyarrow does not number rows.
        read_options=pacsv.ReadOptions(use_threads=False, column_names=list(known), block_size=len(data) + 16),
        parse_options=pacsv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
        convert_options=pacsv.ConvertOptions(include_columns=list(names), column_types=types, null_values=_NULLS),
    )
    return with_rows(table, odd), odd


def with_rows(table: pa.Table, odd: dict[int, str]) -> pa.Table:
    """The table with empty rows inserted at these places."""
    if not odd:
        return table
    good = iter(range(table.num_rows))
    rows = [None if i in odd else next(good) for i in range(table.num_rows + len(odd))]
    return table.take(pa.array(rows, type=pa.int64()))


@dataclass(frozen=True, kw_only=True)
class Text:
    """How to read a column of text as numbers or truth values. `also` combines the findings about two parts."""

    int64: bool = True  # all cells are whole numbers that Arrow can read
    float64: bool = True  # all cells are numbers that Arrow can read
    whole: bool = True  # all numbers are whole and below 2**53
    truths: bool = True  # all cells but NaN are true or false, or 0 or 1
    words: int = 0  # cells that say true or false, less those that say 0 or 1

    def also(self, other: Text) -> Text:
        """The findings that hold for both parts."""
        return Text(
            int64=self.int64 and other.int64,
            float64=self.float64 and other.float64,
            whole=self.whole and other.whole,
            truths=self.truths and other.truths,
            words=self.words + other.words,
        )

    @property
    def kind(self) -> pa.DataType:
        """The type of the values."""
        if self.truths and self.words >= 0 and not (self.int64 or self.float64):
            return pa.bool_()
        return pa.int64() if self.int64 or (self.whole and not self.float64) else pa.float64()


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Cells of a column of text."""

    text: Text
    values: pa.ChunkedArray  # int64, float64 or bool; null if the cell is no such value
    bad: dict[int, str] = field(default_factory=dict)  # positions of cells that are no such value

    @classmethod
    def of(cls, column: pa.ChunkedArray, name: str) -> Cells:
        """Read the cells as values of the narrowest type that fits all of them."""
        cells = trimmed(as_text(column))
        is_truth = _truths(cells).is_valid()
        said, digits = pc.sum(is_truth).as_py() or 0, pc.sum(pc.is_in(cells, _spelled()[2])).as_py() or 0
        words = said - 2 * digits
        for kind in (pa.int64(), pa.float64()):
            try:
                values = cells.cast(kind)
            except pa.ArrowInvalid:
                continue
            others = pc.filter(values, pc.invert(is_truth)).drop_null()
            truths = pc.all(pc.is_nan(others), min_count=0).as_py()  # of whole numbers none is
            text = Text(int64=kind == pa.int64(), whole=_all_whole(values), truths=truths, words=words)
            return cls(text=text, values=values)
        odd = set(pc.filter(cells, pc.invert(is_truth)).unique().to_pylist()) - {None}
        whole = all(_whole(number_in(cell)) for cell in odd)
        truths = all(_is_nan(cell) for cell in odd)
        return cls.read(cells, Text(int64=False, float64=False, whole=whole, truths=truths, words=words), name)

    @classmethod
    def read(cls, column: pa.ChunkedArray, text: Text, name: str) -> Cells:
        """Read the cells of a part of a column like the whole column, of which `text` was found."""
        cells = trimmed(as_text(column))
        if text.int64 or text.float64:
            return cls(text=text, values=cells.cast(text.kind))
        if text.kind == pa.bool_():
            values = _truths(cells)
            odd = np.flatnonzero(np.asarray(pc.and_(values.is_null(), cells.is_valid()))).tolist()
            why = {i: f"column {name!r} holds {cells[i].as_py()!r}; expected true or false" for i in odd}
            return cls(text=text, values=values, bad=why)
        bad: dict[int, str] = {}
        numbers: list[float | None] = []
        for i, cell in enumerate(cells.to_pylist()):
            value = None
            if cell is not None and (value := number_in(cell)) is None:
                bad[i] = f"column {name!r} holds {cell[:40]!r}; expected a number"
            numbers.append(value)
        values = pa.chunked_array([pa.array(numbers, type=pa.float64()).cast(text.kind)])
        return cls(text=text, values=values, bad=bad)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type is text: of bytes if some cell is not UTF-8."""
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cells of text or bytes as text; bytes that are not UTF-8 become U+FFFD."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        cells = [None if cell is None else bytes(cell).decode("utf-8", "replace") for cell in column.to_pylist()]
        return pa.chunked_array([pa.array(cells, type=pa.string())])


def trimmed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The cells without surrounding blanks; a blank cell becomes null."""
    cells = pc.utf8_trim_whitespace(column)
    return pc.if_else(pc.equal(cells, ""), pa.scalar(None, pa.string()), cells)


def number_in(cell: str) -> float | None:
    """The number that Python reads, except that digits with underscores, such as 2023_01, are a name."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def is_number(cell: str) -> bool:
    """Whether `number_in` reads it as a number."""
    return number_in(cell) is not None


@functools.cache
def _spelled() -> tuple[pa.Array, pa.Array, pa.Array]:
    """How pyarrow spells true and false in CSV, and those of them that are numbers. Making arrays imports pandas."""
    options = pacsv.ConvertOptions()
    return pa.array(options.true_values), pa.array(options.false_values), pa.array(["0", "1"])


def _truths(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """True and false as pyarrow spells them in CSV; null for other cells."""
    true, false = (pc.is_in(cells, spelled) for spelled in _spelled()[:2])
    return pc.if_else(pc.or_(true, false), true, pa.scalar(None, pa.bool_()))


def _is_nan(cell: str) -> bool:
    value = number_in(cell)
    return value is not None and value != value


def _all_whole(values: pa.ChunkedArray) -> bool:
    for chunk in values.chunks:
        held = np.asarray(pc.fill_null(chunk, 0))
        if not bool(((np.abs(held) < 2**53) & (held == np.trunc(held))).all()):
            return False
    return True


def _whole(value: float | None) -> bool:
    return value is None or (abs(value) < 2**53 and value.is_integer())
