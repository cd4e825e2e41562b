"""Makes Arrow's arrays of columns, and looks into them, without pandas.

`pyarrow.array` is not used here, because it asks whether its input is pandas' and so imports pandas, if that is
installed, and parts of numpy. That holds Python's lock for a third of a second, while the other stages of a job wait.
So do plain Python values as arguments of `pyarrow.compute`, `numpy.asarray` of an array, and conversions of truth
values to numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MOST_BYTES = 2**31 - 1  # that the offsets of Arrow's strings reach


def numbers(values: np.ndarray) -> Any:
    """The array for numbers or truth values [n, ...], with lists of fixed size for the axes after the first."""
    if values.dtype == np.float16:  # few readers support it
        values = values.astype(np.float32)
    flat = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("=")).reshape(-1)
    bits = np.packbits(flat, bitorder="little") if flat.dtype == np.bool_ else flat
    made = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(bits)])
    for length in reversed(values.shape[1:]):
        made = pa.FixedSizeListArray.from_arrays(made, length)
    return made


def values(array: pa.Array) -> np.ndarray:
    """The numbers of an array without nulls, read-only and not copied."""
    return np.from_dlpack(array)


def texts(values: Sequence[str]) -> Any:
    """The array for text, in several chunks if it takes more than 2 GiB."""
    joined = "".join(values)
    if joined.isascii():
        data, lengths = joined.encode(), map(len, values)
    else:
        encoded = [text.encode() for text in values]
        data, lengths = b"".join(encoded), map(len, encoded)
    if len(data) > _MOST_BYTES:
        return pa.array(values, type=pa.string())
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(lengths, dtype=np.int32, count=len(values)), out=offsets[1:])
    return pa.Array.from_buffers(pa.string(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def empties(column: pa.Array) -> list[int]:
    """The positions of texts that are null or empty."""
    empty, true = texts([""])[0], numbers(np.array([True]))[0]
    at: list[int] = values(pc.indices_nonzero(pc.fill_null(pc.equal(column, empty), true))).tolist()
    return at


def first_not_utf8(column: pa.ChunkedArray) -> int | None:
    """The position of the first text, or bytes, that are not UTF-8; None if there are none."""
    try:
        (column.cast(pa.string()) if pa.types.is_binary(column.type) else column).validate(full=True)
    except pa.ArrowInvalid:
        return next(i for i, value in enumerate(v for chunk in column.chunks for v in chunk) if not _is_utf8(value))
    return None


def _is_utf8(value: pa.Scalar) -> bool:
    try:
        if value.is_valid:
            value.as_buffer().to_pybytes().decode()
    except UnicodeDecodeError:
        return False
    return True
