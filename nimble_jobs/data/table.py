"""The source for Parquet and CSV: rows in blocks, decoded ahead or kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nimble_jobs.data import arrow, columns
from nimble_jobs.data.blocks import Block, Give, Kept, Layout, as_slice, keep_bytes
from nimble_jobs.data.decoder import PIECE, ImageDecoder
from nimble_jobs.data.ids import Ids, as_ids, no_id
from nimble_jobs.data.source import READY, Loaded, Wanted, form_of, placed, record_of, unknown_field
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.transform import ArrayTransform, bind
from nimble_jobs.decoding.picture import Undecodable, header_size
from nimble_jobs.errors import DataError, NoRecords
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec.model import InputSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenTable:
    """What is known of a file of rows before they are read."""

    names: Sequence[str]  # the columns of `fields.x`
    schema: pa.Schema  # which knows their types
    layout: Layout
    read: Callable[[int], pa.Table]  # these columns in a block
    extra: pa.Table  # the id and label columns, and those with paths of pictures, whole
    bad: Mapping[int, str] = field(default_factory=dict)  # why rows are no rows of the table; they have no id
    cells: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # why cells are no numbers, by column and row
    line: Callable[[int], str] | None = None  # FILE:LINE of a row


class TableSource:
    """Rows of one file."""

    def __init__(self, spec: InputSpec, stamp: Stamp, table: OpenTable) -> None:
        schema, layout, line = table.schema, table.layout, table.line
        self._names = table.names
        self._read = table.read
        self._line = line
        self.lines = line is not None
        self._allow_nan = spec.allow_nan
        self._bad = dict(table.bad)
        for name in table.names:
            for row, why in table.cells.get(name, {}).items():
                self._bad.setdefault(row, why)
        self._bad_rows = np.array(sorted(self._bad), dtype=np.int64)
        self._kept = Kept(self.block, keep_bytes)
        self._where = f"{stamp.path}: input.fields.{spec.fields.which}: {spec.fields.name!r}"
        self.layout: Layout | None = layout
        self.notes: tuple[str, ...] = ()
        self._starts = layout.starts
        self.total = int(layout.starts[-1])
        self.stamps = (stamp,)
        self.piece: int | None = None
        if self.total == 0:
            raise NoRecords(f"{stamp.path}: no records; expected at least one")
        self.ids, self.labels = ids_and_labels(spec, stamp, table)
        self.preprocess: Preprocess | None = None
        self._transform: ArrayTransform | None = None
        self.decoder: ImageDecoder | None = None
        self._tensor: columns.Tensor | None = None
        self._shape: tuple[int, ...] = (len(self._names),)
        self._learn(spec, schema)

    def _learn(self, spec: InputSpec, schema: pa.Schema) -> None:
        """The type and shape of a record, from the columns' types and, for lists, the first one that is not null."""
        kinds = [columns.stored_as(schema.field(n).type) for n in self._names]
        if len(kinds) == 1 and columns.is_encoded(kinds[0]):
            self.decoder = ImageDecoder(spec.transform, self._where)
            self.notes = self.decoder.notes
            if self.decoder.size is None:
                self.decoder.set_size(self._first_size())
            self.piece = PIECE
            self.signature = self.decoder.signature
            self.preprocess = self.decoder.preprocess
            return
        if len(kinds) == 1 and columns.is_list(kinds[0]):
            kind = kinds[0]
            while columns.is_list(kind):
                kind = kind.value_type
            self._dtype = columns.numpy_dtype(kind, self._where)
            self._tensor = columns.tensor_of(schema.field(self._names[0]).type)
            self._shape = self._tensor.stored if self._tensor is not None else self._first_shape()
        else:
            self._dtype = np.result_type(
                *(
                    columns.numpy_dtype(k, f"{self._where}: column {n!r}")
                    for n, k in zip(self._names, kinds, strict=True)
                )
            )
        shape = self._shape if self._tensor is None else self._tensor.shape
        self._transform = bind(spec.transform, shape, self._dtype, self._where)
        self.signature = self._transform.signature
        self.preprocess = self._transform.preprocess

    def _first_shape(self) -> tuple[int, ...]:
        for number in range(len(self._starts) - 1):
            shape = columns.first_shape(columns.joined(self.table(number).column(self._names[0])))
            if shape is not None:
                return shape
        raise DataError(f"{self._where}: every record is empty; expected lists of numbers")

    def _first_size(self) -> tuple[int, int]:
        for number in range(len(self._starts) - 1):
            for data in self.block(number).values:
                try:
                    return header_size(columns.give_bytes(data))
                except Undecodable:
                    continue
        raise DataError(f"{self._where}: no record can be decoded; expected encoded images or lists of numbers")

    def place(self, index: int) -> str:
        return self._line(index) if self._line else record_of(self.stamps[0].path, index)

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        if self.decoder is not None:
            return self.decoder.load(self._pictures(indexes, give or self._kept), indexes, wanted, into=into)
        assert wanted.crops is None
        of = self._of(indexes)
        form = form_of(self, stored=wanted.stored)
        x = np.empty((len(indexes), *form.shape), dtype=form.dtype) if into is None else into
        bad: dict[int, str] = {}
        for number in np.unique(of).tolist():
            positions = np.flatnonzero(of == number)
            block = (give or self._kept)(number)
            rows = indexes[positions] - self._starts[number]
            places = block.place[rows]
            if block.bad:
                for p, row in zip(positions[places < 0].tolist(), rows[places < 0].tolist(), strict=True):
                    bad[p] = block.bad[row]
                positions, places = positions[places >= 0], places[places >= 0]
            self._copy(block.values[as_slice(places)], x, as_slice(positions), stored=wanted.stored)
        if bad:
            good = np.ones(len(indexes), dtype=bool)
            good[list(bad)] = False
            x = placed(x[good], x)
        return Loaded(x=x, bad=bad)

    def _pictures(self, indexes: np.ndarray, give: Give) -> list[bytes | memoryview | str]:
        """Encoded pictures, or the reasons why they are missing."""
        pictures: list[bytes | memoryview | str] = []
        for index, number in zip(indexes.tolist(), self._of(indexes).tolist(), strict=True):
            block = give(number)
            row = index - int(self._starts[number])
            place = int(block.place[row])
            pictures.append(block.bad[row] if place < 0 else block.values[place])
        return pictures

    def _of(self, indexes: np.ndarray) -> np.ndarray:
        """The block of each row."""
        return np.searchsorted(self._starts, indexes, side="right") - 1

    def _copy(self, values: np.ndarray, x: np.ndarray, positions: slice | np.ndarray, *, stored: bool) -> None:
        assert self._transform is not None
        x[positions] = values if stored else self._transform(values)

    def check(self, indexes: np.ndarray) -> None:
        """Nothing to do: the file is checked when a block is read."""

    def block(self, number: int) -> Block:
        """Read one block. Raises DataError if the file has changed or cannot be read."""
        return self.block_of(number, self.table(number))

    def block_of(self, number: int, table: pa.Table) -> Block:
        """A block from its rows."""
        block = self._make(table)
        first = int(self._starts[number])
        a, b = np.searchsorted(self._bad_rows, (first, first + len(block.place)))
        for i in self._bad_rows[a:b].tolist():
            block.bad[i - first] = self._bad[i]
            block.place[i - first] = -1
        return block

    def table(self, number: int) -> pa.Table:
        """The rows of a block. Raises DataError if the file has changed or cannot be read."""
        self.stamps[0].check()
        table = self._read(number)
        self.stamps[0].check()
        return table

    def _make(self, table: pa.Table) -> Block:
        if self.decoder is not None:
            return columns.encoded(table.column(self._names[0]), self._names[0])
        if self._shape == (len(self._names),) and not columns.is_list(
            columns.stored_as(table.schema.field(self._names[0]).type)
        ):
            return columns.scalars(table, self._names, self._dtype, allow_nan=self._allow_nan)
        block = columns.lists(columns.joined(table.column(self._names[0])), self._shape, self._names[0])
        return block if self._tensor is None else self._tensor.block(block)


class ColumnIds(Ids):
    """Ids in an Arrow column of text, null where they are made up: `row-N` with the record's position in its file."""

    def __init__(self, column: pa.ChunkedArray, made_up: Collection[int] = ()) -> None:
        super().__init__((), made_up)
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def _one(self, at: int) -> str:
        return self._column[at].as_py() or f"row-{at}"

    def _several(self, at: range) -> list[str]:
        texts: list[str | None] = self._column[at.start : at.stop : at.step].to_pylist()
        return [text or f"row-{i}" for i, text in zip(at, texts, strict=True)] if self.made_up else texts  # type: ignore[return-value]  # all are texts then


def ids_and_labels(spec: InputSpec, stamp: Stamp, table: OpenTable) -> tuple[Ids | None, np.ndarray | None]:
    """The ids and labels that the spec names; None where it names none. Raises DataError."""
    ids = labels = None

    def column(which: str, name: str) -> tuple[pa.ChunkedArray, str]:
        where = f"{stamp.path}: input.fields.{which}: {name!r}"
        return _as_utf8(table.extra.column(name), where, table.line), where

    if spec.fields.id is not None:
        ids = column_ids(*column("id", spec.fields.id), table.line, table.bad)
    if spec.fields.label is not None:
        labels = to_objects(*column("label", spec.fields.label))
    return ids, labels


def _as_utf8(column: pa.ChunkedArray, where: str, line: Callable[[int], str] | None) -> pa.ChunkedArray:
    """The column, in which bytes of a CSV file are text. Raises DataError for text that is not UTF-8."""
    kind = column.type
    is_bytes = line is not None and pa.types.is_binary(kind)
    if not is_bytes and not is_text(kind):
        return column
    if (at := arrow.first_not_utf8(column)) is not None:
        place = line(at) if line is not None else f"record {at}"
        raise DataError(f"{where}: the text at {place} is not UTF-8; expected text in UTF-8")
    return column.cast(pa.string()) if is_bytes else column


def column_ids(
    column: pa.ChunkedArray, where: str, line: Callable[[int], str] | None, odd: Collection[int] = ()
) -> Ids:
    """The ids in a column. Raises DataError unless it holds whole numbers or text, one per record that is not `odd`."""
    if not is_text(column.type):
        if column.null_count:
            raise no_id(int(np.argmax(column.is_null())), where, line)
        return as_ids(to_objects(column, where), len(column), where, line)
    first = 0
    for chunk in column.chunks:
        for at in arrow.empties(chunk):
            if first + at not in odd:
                raise no_id(first + at, where, line)
        first += len(chunk)
    return ColumnIds(column, odd)


def is_plain_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts, plain or as a dictionary."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text as it is."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def to_objects(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """An id or label column. Numbers stay, with NaN for null. Text becomes objects, with None for null; equal texts
    share memory.

    Raises DataError for lists, structures and bytes.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_nested(kind) or columns.is_binary(columns.stored_as(kind)):
        raise DataError(f"{where}: holds {kind}; expected whole numbers or text, one for each record")
    if not is_text(kind):
        return np.asarray(columns.joined(column.cast(kind)).to_numpy(zero_copy_only=False))
    texts: dict[str | None, str | None] = {}
    held = np.empty(len(column), dtype=object)
    first = 0
    for chunk in column.chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        known = np.array([*(texts.setdefault(t, t) for t in coded.dictionary.to_pylist()), None], dtype=object)
        held[first : first + len(chunk)] = known[np.asarray(pc.fill_null(coded.indices.cast(pa.int64()), -1))]
        first += len(chunk)
    return held


def single_columns(spec: InputSpec) -> dict[str, str]:
    """The name of the column that each argument is read from, or `x` if it is the only one; also names of several."""
    return spec.fields.arguments if spec.fields.arguments is not None else {"x": spec.fields.name}


def check_columns(spec: InputSpec, path: Path, known: Sequence[str]) -> tuple[list[str], list[str]]:
    """Columns of x, and the id and label columns. Raises DataError for missing ones."""
    arguments = spec.fields.arguments
    if spec.format == "text":
        names = list(spec.fields.columns)
        if missing := [name for name in names if name not in known]:
            raise unknown_field(path, "x", missing[0], known)
    elif arguments is None:
        names = columns.choose(path, spec.fields.name, known)
    else:
        chosen = [columns.choose(path, name, known, f"x.{argument}") for argument, name in arguments.items()]
        names = list(dict.fromkeys(name for some in chosen for name in some))
    extra = []
    for which in ("id", "label"):
        name = getattr(spec.fields, which)
        if name is not None:
            if name not in known:
                raise unknown_field(path, which, name, known)
            extra.append(name)
    columns.only_once(path, known, [*names, *extra])
    return names, extra
