"""The source that Parquet and CSV share: rows in groups, a few of which are kept in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from nimble_jobs.data import columns
from nimble_jobs.data.columns import Block
from nimble_jobs.data.images import ImageDecoder, Undecodable, header_size
from nimble_jobs.data.source import Loaded, Stamp, as_ids, form_of, placed, record_of, unknown_field
from nimble_jobs.data.transform import ArrayTransform, bind
from nimble_jobs.errors import DataError
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.spec.model import InputSpec

KEEP_BYTES = 256 << 20  # of row groups, so that reading in random order does not read each group again for each batch


class TableSource:
    """Rows of one file. `read(group)` gives the columns of `fields.x`; `extra` holds the id and label columns whole."""

    def __init__(
        self,
        spec: InputSpec,
        stamp: Stamp,
        *,
        names: Sequence[str],
        group_rows: Sequence[int],
        read: Callable[[int], pa.Table],
        extra: pa.Table,
        bad: dict[int, str] | None = None,
        line: Callable[[int], str] | None = None,
    ) -> None:
        self._names = names
        self._read = read
        self._starts = np.cumsum([0, *group_rows])
        self._line = line
        self.lines = line is not None
        self._bad = bad or {}  # rows that were no rows of the table to begin with
        self._kept: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()
        self._where = f"{stamp.path}: input.fields.x: {spec.fields.x!r}"
        self.total = int(self._starts[-1])
        self.stamps = (stamp,)
        self.piece: int | None = None
        if self.total == 0:
            raise DataError(f"{stamp.path}: no records; expected at least one")
        self.ids = None
        if spec.fields.id is not None:
            self.ids = as_ids(
                to_objects(extra.column(spec.fields.id), where := f"{stamp.path}: input.fields.id: {spec.fields.id!r}"),
                self.total,
                where,
                line,
            )
        self.labels = None
        if spec.fields.label is not None:
            where = f"{stamp.path}: input.fields.label: {spec.fields.label!r}"
            self.labels = to_objects(extra.column(spec.fields.label), where)
        self.preprocess: Preprocess | None = None
        self._transform: ArrayTransform | None = None
        self._decoder: ImageDecoder | None = None
        self._shape: tuple[int, ...] = (len(names),)
        self._learn(spec)

    def _learn(self, spec: InputSpec) -> None:
        """Finds what one record is, from the schema and the first row that has something."""
        first = self._read(0)
        kinds = [first.schema.field(n).type for n in self._names]
        kinds = [k.storage_type if isinstance(k, pa.BaseExtensionType) else k for k in kinds]
        if len(kinds) == 1 and columns.is_binary(kinds[0]):
            self._decoder = ImageDecoder(spec.transform, self._where)
            if self._decoder.size is None:
                self._decoder.set_size(self._first_size())
            self.piece = 4
            self.signature, self.pixels = self._decoder.signature, self._decoder.pixels
            return
        if len(kinds) == 1 and columns.is_list(kinds[0]):
            kind = kinds[0]
            while columns.is_list(kind):
                kind = kind.value_type
            self._dtype = columns.numpy_dtype(kind, self._where)
            self._shape = self._first_shape()
        else:
            self._dtype = np.result_type(
                *(
                    columns.numpy_dtype(k, f"{self._where}: column {n!r}")
                    for n, k in zip(self._names, kinds, strict=True)
                )
            )
        self._transform = bind(spec.transform, self._shape, self._dtype, self._where)
        self.signature, self.pixels = self._transform.signature, self._transform.pixels
        self.preprocess = self._transform.preprocess

    def _first_shape(self) -> tuple[int, ...]:
        for group in range(len(self._starts) - 1):
            shape = columns.first_shape(columns.joined(self._read(group).column(self._names[0])))
            if shape is not None:
                return shape
        raise DataError(f"{self._where}: every record is empty; expected lists of numbers")

    def _first_size(self) -> tuple[int, int]:
        for group in range(len(self._starts) - 1):
            for value in columns.joined(self._read(group).column(self._names[0])):
                try:
                    if value.is_valid:
                        return header_size(columns.give_bytes(value.as_py()))
                except Undecodable:
                    continue
        raise DataError(f"{self._where}: no record can be decoded; expected encoded images or lists of numbers")

    def place(self, index: int) -> str:
        return self._line(index) if self._line else record_of(self.stamps[0].path, index)

    def load(
        self, indexes: np.ndarray, *, raw: bool = False, stored: bool = False, into: np.ndarray | None = None
    ) -> Loaded:
        groups = np.searchsorted(self._starts, indexes, side="right") - 1
        form = form_of(self, raw=raw, stored=stored)
        x = np.empty((len(indexes), *form.shape), dtype=form.dtype) if into is None else into
        bad: dict[int, str] = {}
        for group in np.unique(groups).tolist():
            positions = np.flatnonzero(groups == group)
            block = self._block(group)
            rows = indexes[positions] - self._starts[group]
            places = block.place[rows]
            for p, row in zip(positions[places < 0].tolist(), rows[places < 0].tolist(), strict=True):
                bad[p] = block.bad[row]
            positions, places = positions[places >= 0], places[places >= 0]
            if self._decoder is not None:
                images = [partial(columns.give_bytes, block.values[i]) for i in places.tolist()]
                loaded = self._decoder.load(images, raw=raw)
                bad.update({int(positions[i]): reason for i, reason in loaded.bad.items()})
                x[np.delete(positions, list(loaded.bad))] = loaded.x
            else:
                assert self._transform is not None
                assert isinstance(block.values, np.ndarray)
                values = block.values[places]
                x[positions] = values if stored else self._transform.raw(values) if raw else self._transform(values)
        if bad:
            good = np.ones(len(indexes), dtype=bool)
            good[list(bad)] = False
            x = placed(x[good], x)
        return Loaded(x=x, bad=bad)

    def check(self, indexes: np.ndarray) -> None:
        """Row groups are compared when they are read."""

    def _block(self, group: int) -> Block:
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
            self.stamps[0].check()
            block = self._make(self._read(group))
            first = int(self._starts[group])
            for i, reason in self._bad.items():
                if first <= i < first + len(block.place):
                    block.bad[i - first] = reason
                    block.place[i - first] = -1
            self._kept[group] = block
            while len(self._kept) > 1 and sum(b.nbytes for b in self._kept.values()) > KEEP_BYTES:
                self._kept.popitem(last=False)
            return block

    def _make(self, table: pa.Table) -> Block:
        if self._decoder is not None:
            return columns.encoded(columns.joined(table.column(self._names[0])), self._names[0])
        if self._shape == (len(self._names),) and not columns.is_list(table.schema.field(self._names[0]).type):
            return columns.scalars(table, self._names, self._dtype)
        return columns.lists(columns.joined(table.column(self._names[0])), self._shape, self._names[0])


def to_objects(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """An id or label column: numbers as they are, NaN where empty; text as objects, None where empty.

    Raises DataError for lists, structures and bytes.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array = columns.joined(column)
    kind = array.type
    if pa.types.is_nested(kind) or columns.is_binary(kind):
        raise DataError(f"{where}: holds {kind}; expected whole numbers or text, one for each record")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(array.to_pylist(), dtype=object)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def check_columns(spec: InputSpec, path: Path, known: Sequence[str]) -> tuple[list[str], list[str]]:
    """Columns of x, and the id and label columns. Raises DataError for those that are not there."""
    names = columns.choose(path, spec.fields.x, known)
    extra = []
    for which in ("id", "label"):
        name = getattr(spec.fields, which)
        if name is not None:
            if name not in known:
                raise unknown_field(path, which, name, known)
            extra.append(name)
    columns.only_once(path, known, [*names, *extra])
    return names, extra
