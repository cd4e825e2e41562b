"""Texts in the columns of one table."""

from __future__ import annotations

import pyarrow as pa

from nimble_jobs.data import columns
from nimble_jobs.data.blocks import Block
from nimble_jobs.data.source import record_of
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import OpenTable, ids_and_labels, is_plain_text, is_text
from nimble_jobs.data.text.values import Rows, TextSource, Unreadable, decoded, paired
from nimble_jobs.errors import DataError, NoRecords
from nimble_jobs.spec.model import InputSpec


class TableTexts(TextSource):
    """Columns of text of one file."""

    def __init__(self, spec: InputSpec, stamp: Stamp, table: OpenTable) -> None:
        if int(table.layout.starts[-1]) == 0:
            raise NoRecords(f"{stamp.path}: no records; expected at least one")
        for name in table.names:
            kind = columns.stored_as(table.schema.field(name).type)
            empty = pa.types.is_null(kind)  # what writers make of a column without a value
            if not (is_plain_text(kind) or empty or (table.line and columns.is_binary(kind))):
                raise DataError(f"{stamp.path}: input.fields.x: column {name!r} holds {kind}; expected text")
        ids, labels = ids_and_labels(spec, stamp, table)
        super().__init__(stamp, table.layout, ids=ids, labels=labels)
        self._table = table

    def place(self, index: int) -> str:
        line = self._table.line
        return line(index) if line is not None else record_of(self.stamps[0].path, index)

    def rows(self, number: int) -> Rows:
        return self._rows(number, self._table.read(number))

    def block_of(self, number: int, table: pa.Table) -> Block:
        """A block from its rows, which may have more columns."""
        return self._rows(number, table).block()

    def table(self, number: int) -> pa.Table:
        """The rows of a block. Raises DataError if the file has changed or cannot be read."""
        self.stamps[0].check()
        table = self._table.read(number)
        self.stamps[0].check()
        return table

    def _rows(self, number: int, table: pa.Table) -> Rows:
        first = int(self._table.layout.starts[number])
        bad = {row: self._table.bad[first + row] for row in range(table.num_rows) if first + row in self._table.bad}
        texts = [_texts(table.column(name), name, bad) for name in self._table.names]
        nbytes = sum(table.column(name).nbytes for name in self._table.names)
        return Rows(texts=paired(texts, bad), bad=bad, nbytes=nbytes)


def _texts(column: pa.ChunkedArray, name: str, bad: dict[int, str]) -> list[str | None]:
    """The texts in a column. Rows without one are added to `bad`."""
    try:
        values: list[str | bytes | None] = column.to_pylist()
    except UnicodeDecodeError:  # Parquet promises UTF-8, but writers break that promise
        values = _bytes(column).to_pylist()
    else:
        if not column.null_count and is_text(column.type):
            return values  # type: ignore[return-value]  # all of it is text
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
