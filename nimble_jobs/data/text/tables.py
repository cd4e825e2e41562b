"""Texts in columns of Parquet and CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nimble_jobs import moves
from nimble_jobs.data import columns
from nimble_jobs.data.blocks import Layout
from nimble_jobs.data.csv_blocks import Blocks, Found, Lines, extra_of
from nimble_jobs.data.csv_cells import parse
from nimble_jobs.data.csv_cuts import Cut, cuts
from nimble_jobs.data.csv_file import header
from nimble_jobs.data.parquet import opened_as
from nimble_jobs.data.source import record_of
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import OpenTable, check_columns, column_ids, to_objects
from nimble_jobs.data.text.values import Rows, TextSource, Unreadable, decoded, paired
from nimble_jobs.errors import DataError
from nimble_jobs.pipeline import mapped, usable_cores
from nimble_jobs.spec.model import InputSpec


class TableTexts(TextSource):
    """Columns of text of one file."""

    def __init__(self, spec: InputSpec, stamp: Stamp, table: OpenTable) -> None:
        if int(table.layout.starts[-1]) == 0:
            raise DataError(f"{stamp.path}: no records; expected at least one")
        for name in table.names:
            kind = columns.stored_as(table.schema.field(name).type)
            if not _is_text(kind) and not (table.line and columns.is_binary(kind)):
                raise DataError(f"{stamp.path}: input.fields.x: column {name!r} holds {kind}; expected text")
        fields, where = spec.fields, f"{stamp.path}: input.fields"
        ids = labels = None
        if fields.id is not None:
            ids = column_ids(table.extra.column(fields.id), f"{where}.id: {fields.id!r}", table.line)
        if fields.label is not None:
            labels = to_objects(table.extra.column(fields.label), f"{where}.label: {fields.label!r}")
        super().__init__(stamp, table.layout, ids=ids, labels=labels, lines=table.line is not None)
        self._table = table

    def place(self, index: int) -> str:
        line = self._table.line
        return line(index) if line is not None else record_of(self.stamps[0].path, index)

    def rows(self, number: int) -> Rows:
        table = self._table.read(number)
        first = int(self._table.layout.starts[number])
        bad = {row: self._table.bad[first + row] for row in range(table.num_rows) if first + row in self._table.bad}
        texts = [_texts(table.column(name), name, bad) for name in self._table.names]
        return Rows(texts=paired(texts, bad), bad=bad, nbytes=table.nbytes)


def open_parquet_texts(spec: InputSpec, path: Path) -> TableTexts:
    """Columns of text in one Parquet file. Raises DataError."""
    return opened_as(TableTexts, spec, path)


def open_csv_texts(spec: InputSpec, path: Path) -> TableTexts:
    """Columns of text in one CSV file (UTF-8, comma), read in blocks. Raises DataError."""
    stamp = Stamp.of(path)
    try:
        known = header(path)
        names, extra = check_columns(spec, path, known)
        found = _found(stamp, path, known, names, extra)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read ({e}); expected a .csv file in UTF-8 with a header line") from e
    blocks = Blocks(stamp=stamp, known=known, names=names, found=found)
    starts = np.cumsum([0, *(one.rows for one in found)], dtype=np.int64)
    bad = {int(start) + i: why for one, start in zip(found, starts, strict=False) for i, why in one.odd.items()}
    types = dict.fromkeys(names, pa.binary())
    table = OpenTable(
        names=names,
        schema=pa.schema(list(types.items())),
        layout=Layout(
            starts=starts,
            chains=np.arange(len(found)),
            block_bytes=max((one.cut.nbytes for one in found), default=1),
        ),
        read=lambda number: blocks.parsed(number, names, types)[0],
        extra=extra_of(found, starts, extra, spec.fields.id),
        bad=bad,
        line=Lines(blocks, starts),
    )
    return TableTexts(spec, stamp, table)


def _found(stamp: Stamp, path: Path, known: Sequence[str], names: Sequence[str], extra: Sequence[str]) -> list[Found]:
    """The blocks of a CSV file, with ids and labels; several threads parse."""
    types = {**dict.fromkeys(names, pa.binary()), **dict.fromkeys(extra, pa.string())}

    def first_pass(part: tuple[Cut, bytes]) -> Found:
        cut, data = part
        table, odd = parse(data, known, [*names, *extra], types)
        kinds = tuple(pa.binary() for _ in names)
        return Found(cut=cut, rows=table.num_rows, kinds=kinds, extra=table.select(list(extra)), odd=odd)

    found = []
    with stamp.open() as file:
        threads = usable_cores()
        for one in mapped(first_pass, cuts(file, str(path)), threads=threads, depth=2 * threads, name="nimble-csv"):
            found.append(one)
            moves.made()
    return found


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _texts(column: pa.ChunkedArray, name: str, bad: dict[int, str]) -> list[str | None]:
    """The texts in a column. Rows without one are added to `bad`."""
    try:
        values: list[str | bytes | None] = column.to_pylist()
    except UnicodeDecodeError:  # Parquet promises UTF-8, but writers break that promise
        values = _bytes(column).to_pylist()
    texts: list[str | None] = []
    for row, value in enumerate(values):
        try:
            if value is None:
                raise Unreadable("is null; expected text")
            texts.append(decoded(value) if isinstance(value, bytes) else value)
        except Unreadable as e:
            texts.append(None)
            bad.setdefault(row, f"column {name!r} {e}")
    return texts


def _bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], type=column.type.value_type)
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
