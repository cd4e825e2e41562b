"""Turns columns of an Arrow table into records: selects the columns of `fields.x`, and makes arrays from blocks of
rows.

`fields.x` names one column, or several of plain numbers that are stacked into a vector: a comma list, in which
wildcards (`pixel_*`) stand for the matching columns in the file's order. One column may hold numbers (vectors of length
1), lists of numbers (nested lists for more axes) or, in Parquet, encoded images as binary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nimble_jobs.data.blocks import Block
from nimble_jobs.data.source import unknown_field
from nimble_jobs.errors import DataError
from nimble_jobs.plural import count


def choose(path: Path, x: str, known: Sequence[str], which: str = "x") -> list[str]:
    """The columns that `fields.x`, or one argument of it, names. Raises DataError if a name matches none."""
    names = set(known)
    if x in names:
        return [x]
    chosen: dict[str, None] = {}
    for part in (p.strip() for p in x.split(",")):
        matching = [part] if part in names else [k for k in known if fnmatchcase(k, part)]
        if not matching:
            raise unknown_field(path, which, part, known)
        chosen.update(dict.fromkeys(matching))
    return list(chosen)


def only_once(path: Path, known: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises DataError if two columns have a wanted name."""
    counts = Counter(known)
    for name in wanted:
        if counts[name] > 1:
            raise DataError(f"{path}: two columns are named {name!r}; expected different names")


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Records of the extension type arrow.fixed_shape_tensor, stored as flat lists."""

    physical: tuple[int, ...]  # the shape in storage order
    axes: tuple[int, ...] | None  # permutation from storage order to a record; None: they are the same

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the flat list."""
        return (math.prod(self.physical),)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a record."""
        return self.physical if self.axes is None else tuple(self.physical[a] for a in self.axes)

    def block(self, flat: Block) -> Block:
        """The block with records in their shape, without a copy."""
        values = flat.values.reshape(len(flat.values), *self.physical)
        if self.axes is not None:
            values = values.transpose(0, *(a + 1 for a in self.axes))
        return replace(flat, values=values)


def tensor_of(kind: pa.DataType) -> Tensor | None:
    """The tensor type; None for any other type."""
    if not isinstance(kind, pa.FixedShapeTensorType):
        return None
    axes = None if kind.permutation is None else tuple(kind.permutation)
    return Tensor(physical=tuple(kind.shape), axes=None if axes is None or axes == tuple(sorted(axes)) else axes)


def stored_as(kind: pa.DataType) -> pa.DataType:
    """The type itself, or the storage type of an extension type."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def is_encoded(kind: pa.DataType) -> bool:
    """Whether the type holds encoded images: bytes, or a structure with a field `bytes`."""
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" and is_binary(kind.field(i).type) for i in range(kind.num_fields))
    return is_binary(kind)


def is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind) or _is_view(kind)
    )


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _holds_views(kind: pa.DataType) -> bool:
    """Whether a type has views of lists at any depth, which Arrow's functions do not all take."""
    if _is_view(kind):
        return True
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _holds_views(kind.value_type)


def _without_views(array: pa.Array) -> pa.Array:
    """The same values with lists in place of views of lists. Arrow's own cast takes the offsets over, of which a list
    has one more.
    """
    if not _holds_views(array.type):
        return array
    lengths = pc.fill_null(array.value_lengths(), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    empty = array.is_null() if array.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(offsets), _without_views(array.flatten()), mask=empty)


def is_binary(kind: pa.DataType) -> bool:
    """Whether the type holds bytes, possibly with equal values held once."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return _is_any_length(kind) or bool(pa.types.is_fixed_size_binary(kind))


def _is_any_length(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def numpy_dtype(kind: pa.DataType, where: str) -> np.dtype[Any]:
    """The numpy type. Raises DataError unless the Arrow type holds numbers."""
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"{where}: holds {kind}; expected numbers")
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def joined(column: pa.ChunkedArray) -> pa.Array:
    """One contiguous array, without views of lists; an extension type becomes its storage type."""
    if _holds_views(column.type):
        column = pa.chunked_array(list(map(_without_views, column.chunks or [pa.array([], column.type)])))
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # older pyarrow returns a chunked array with one chunk
        array = array.chunk(0) if array.num_chunks else pa.array([], type=column.type)
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def scalars(table: pa.Table, names: Sequence[str], dtype: np.dtype[Any], *, allow_nan: bool) -> Block:
    """Columns of plain numbers as rows [n, len(names)].

    An empty cell makes a bad record, or, with `allow_nan`, is NaN among floats.
    """
    n = table.num_rows
    values = np.empty((n, len(names)), dtype=dtype)
    bad: dict[int, str] = {}
    for j, name in enumerate(names):
        array = joined(table.column(name))
        if array.null_count and not (allow_nan and pa.types.is_floating(array.type)):
            for row in np.flatnonzero(_is_null(array)).tolist():
                bad.setdefault(row, f"column {name!r} is empty; expected a number")
            array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
        values[:, j] = array.to_numpy(zero_copy_only=False)
    good = np.ones(n, dtype=bool)
    good[list(bad)] = False
    return _block(values[good] if bad else values, good, bad, values.nbytes)


def lists(column: pa.Array, shape: tuple[int, ...], name: str) -> Block:
    """A column of (nested) lists as rows [n, *shape]. Lists of another shape, or with nulls, are bad records."""
    rows = np.arange(len(column))  # which lists are still good, expanded to their elements at each level
    bad: dict[int, str] = {}
    array, per_row = column, 1
    for axis, length in enumerate(shape):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), -1))
        if (lengths != length).any():
            owner = np.repeat(rows, per_row)
            for i in np.flatnonzero(lengths != length).tolist():
                problem = "is null" if lengths[i] < 0 else f"holds {count(int(lengths[i]), 'value')} on axis {axis}"
                bad.setdefault(int(owner[i]), f"column {name!r} {problem}; expected shape {shape}")
            keep = ~np.isin(rows, list(bad))
            array = array.filter(pa.array(np.repeat(keep, per_row)))
            rows = rows[keep]
        array = array.flatten()
        per_row *= length
    if array.null_count and not pa.types.is_floating(array.type):
        holes = np.unique(np.flatnonzero(_is_null(array)) // per_row)
        bad.update({int(rows[i]): f"column {name!r} has nulls; expected numbers" for i in holes})
        keep = np.ones(len(rows), dtype=bool)
        keep[holes] = False
        array, rows = array.filter(pa.array(np.repeat(keep, per_row))), rows[keep]
    values = array.to_numpy(zero_copy_only=False).reshape(len(rows), *shape)
    good = np.zeros(len(column), dtype=bool)
    good[rows] = True
    return _block(values, good, bad, values.nbytes)


def bytes_path(name: str, kind: pa.DataType) -> str | None:
    """The path, within a Parquet file, of the bytes of a column of encoded images; None for any other column, and for
    bytes of a fixed length.
    """
    kind = stored_as(kind)
    path = name
    if pa.types.is_struct(kind) and is_encoded(kind):
        kind, path = kind.field("bytes").type, f"{name}.bytes"
    return path if _is_any_length(kind) else None


class Encoded(Sequence[memoryview]):
    """Encoded images in Arrow's memory, equal ones possibly once, without copies."""

    def __init__(self, chunks: Sequence[pa.Array], rows: np.ndarray) -> None:
        self._chunks = chunks
        self._starts = np.cumsum([0, *map(len, chunks)])
        self._rows = rows  # of the images that are not null

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = int(self._rows[index])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        chunk, at = self._chunks[number], row - int(self._starts[number])
        if isinstance(chunk, pa.DictionaryArray):
            chunk, at = chunk.dictionary, chunk.indices[at].as_py()
        return memoryview(chunk[at].as_buffer())


def encoded(column: pa.ChunkedArray, name: str) -> Block:
    """A column of encoded images."""
    chunks = []
    for chunk in column.chunks:
        held = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
        if pa.types.is_struct(held.type):
            held = pc.struct_field(held, "bytes")  # includes the nulls of the structure
        chunks.append(held)
    lengths = [np.asarray(pc.fill_null(_lengths(chunk), 0)) for chunk in chunks]
    good = np.concatenate(lengths) > 0 if lengths else np.empty(0, dtype=bool)
    bad = dict.fromkeys(np.flatnonzero(~good).tolist(), f"column {name!r} is empty; expected an encoded image")
    values = Encoded(chunks, np.flatnonzero(good))
    return _block(values, good, bad, sum(chunk.nbytes for chunk in chunks))


def _lengths(chunk: pa.Array) -> pa.Array:
    """The number of bytes in each row."""
    if isinstance(chunk, pa.DictionaryArray):
        return pc.binary_length(chunk.dictionary).take(chunk.indices)
    return pc.binary_length(chunk)


def first_shape(column: pa.Array) -> tuple[int, ...] | None:
    """The shape of the first row that is not empty, None if there is none."""
    for scalar in column:
        shape: list[int] = []
        value: Any = scalar
        while is_list(value.type) and value.is_valid:
            shape.append(len(value))
            if not shape[-1]:
                break
            value = value[0]
        if shape and (shape[-1] or not is_list(value.type)) and not is_list(value.type):
            return tuple(shape)
    return None


def give_bytes(data: bytes | memoryview) -> BytesIO:
    return BytesIO(data)


def _is_null(array: pa.Array) -> np.ndarray:
    return np.asarray(pc.is_null(array))


def _block(values: np.ndarray | Encoded, good: np.ndarray, bad: dict[int, str], nbytes: int) -> Block:
    return Block(values=values, place=np.where(good, np.cumsum(good) - 1, -1), bad=bad, nbytes=nbytes)
