"""Encodes columns as the bytes of a shard, by format. Equal columns give equal bytes.

A column is a list of text or an array [n, ...]. One axis is a plain column, more axes are lists of fixed size.
Parquet holds them as fixed-size lists, jsonl as arrays (NaN and infinities as null), npy as one file per field.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nimble_jobs.errors import DataError

Columns = Mapping[str, np.ndarray | Sequence[str]]

_FILE_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def encode(format_: str, columns: Columns) -> dict[str, bytes | memoryview]:
    """The bytes by file suffix (`.parquet`, `.jsonl`, `.FIELD.npy`). Raises DataError for a field that the format
    cannot hold.
    """
    columns = {name: c if isinstance(c, np.ndarray) else [valid(text) for text in c] for name, c in columns.items()}
    if format_ == "parquet":
        return {".parquet": _parquet(columns)}
    if format_ == "jsonl":
        return {".jsonl": _jsonl(columns)}
    return _npy(columns)


def valid(text: str) -> str:
    """The text as every format can hold it: bytes of a file name that are no UTF-8 become `\\udcff` and the like."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def records(columns: Columns) -> int:
    """The number of records. Raises DataError if the columns differ in length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"output columns differ in length: {lengths}; expected one value for each record")
    return next(iter(lengths.values()), 0)


def _parquet(columns: Columns) -> memoryview:
    import pyarrow as pa  # imported here, so that jobs with other formats need not load it
    import pyarrow.parquet as pq

    def array(column: np.ndarray | Sequence[str]) -> Any:
        if not isinstance(column, np.ndarray):
            return pa.array(column, type=pa.string())
        if column.dtype == np.float16:  # few readers support it
            column = column.astype(np.float32)
        flat = pa.array(np.ascontiguousarray(column).reshape(-1))
        for length in reversed(column.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, length)
        return flat

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: array(c) for name, c in columns.items()}), sink, compression="snappy")
    return memoryview(sink.getvalue())


def _jsonl(columns: Columns) -> bytes:
    def values(column: np.ndarray | Sequence[str]) -> Sequence[Any]:
        if not isinstance(column, np.ndarray):
            return column
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            plain = column.astype(object)
            plain[~np.isfinite(column)] = None
            column = plain
        held: list[Any] = column.tolist()
        return held

    rows = zip(*(values(c) for c in columns.values()), strict=True)
    names = list(columns)
    lines = (json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, separators=(",", ":")) for row in rows)
    return "".join(line + "\n" for line in lines).encode()


def _npy(columns: Columns) -> dict[str, bytes | memoryview]:
    files: dict[str, bytes | memoryview] = {}
    for name, column in columns.items():
        if not _FILE_SAFE.fullmatch(name):
            raise DataError(f"output.fields: {name!r} cannot be in a file name; expected letters, digits and _ . -")
        array = column if isinstance(column, np.ndarray) else np.array(column, dtype=np.str_)
        sink = io.BytesIO()
        np.save(sink, array, allow_pickle=False)
        files[f".{name}.npy"] = sink.getbuffer()
    return files
