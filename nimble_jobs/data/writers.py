"""Encodes columns as the bytes of a shard, by format. Equal columns give equal bytes.

A column is a list of text, an array [n, ...], or lists of different lengths. One axis is a plain column, more axes are
lists of fixed size. Parquet holds them as fixed-size lists, jsonl as arrays (NaN and infinities as null), npy as one
file per field, without lists of different lengths.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nimble_jobs.data.ragged import Ragged
from nimble_jobs.errors import DataError, ModelError
from nimble_jobs.spec.formats import LISTS, either

Column = np.ndarray | Sequence[str] | Ragged
Columns = Mapping[str, Column]
Form = tuple[str, tuple[int, ...]]  # the type and shape of a record's value

_FILE_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def encode(format_: str, columns: Columns) -> dict[str, bytes | memoryview]:
    """The bytes by file suffix (`.parquet`, `.jsonl`, `.FIELD.npy`). Raises DataError for a field that the format
    cannot hold.
    """
    columns = {name: _valid(c) for name, c in columns.items()}
    if format_ == "parquet":
        return {".parquet": _parquet(columns)}
    if format_ == "jsonl":
        return {".jsonl": _jsonl(columns)}
    if format_ == "openai-batch":
        return {".jsonl": "".join(f"{line}\n" for line in columns["line"]).encode()}
    return _npy(columns)


def _valid(column: Column) -> Column:
    if isinstance(column, Ragged) and column.values.dtype.kind == "U":
        return Ragged(np.array([valid(text) for text in column.values.tolist()], dtype=np.str_), column.lengths)
    if isinstance(column, np.ndarray | Ragged):
        return column
    return [valid(text) for text in column]


def valid(text: str) -> str:
    """The text as every format can hold it: bytes of a file name that are no UTF-8 become `\\udcff` and the like."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def form_of(column: Column) -> Form:
    """What a column holds for a record; of lists of different lengths, for each entry."""
    values = column.values if isinstance(column, Ragged) else column
    if not isinstance(values, np.ndarray) or values.dtype.kind == "U":
        return "text", ()
    return str(values.dtype), values.shape[1:]


def check_form(field: str, form: Form, known: Form, where: str, other: str) -> None:
    """Raises ModelError for values of a field that are unlike those that are `known`."""
    for what, value, before in zip(("type", "shape"), form, known, strict=True):
        if value != before:
            shown, shown_before = (list(v) if isinstance(v, tuple) else v for v in (value, before))
            raise ModelError(
                f"output.fields: {field!r} has {what} {shown} for records of {where} and {shown_before} for those of "
                f"{other}; expected one {what} for all records"
            )


def records(columns: Columns) -> int:
    """The number of records. Raises DataError if the columns differ in length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"output columns differ in length: {lengths}; expected one value for each record")
    return next(iter(lengths.values()), 0)


def _parquet(columns: Columns) -> memoryview:
    import pyarrow as pa  # imported here, so that jobs with other formats need not load it
    import pyarrow.parquet as pq

    from nimble_jobs.data import arrow

    def flat(values: np.ndarray) -> Any:
        return arrow.texts(values.tolist()) if values.dtype.kind == "U" else arrow.numbers(values)

    def array(column: Column) -> Any:
        if isinstance(column, Ragged):
            offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int64)
            return pa.LargeListArray.from_arrays(arrow.numbers(offsets), flat(column.values))
        return flat(column) if isinstance(column, np.ndarray) else arrow.texts(column)

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: array(c) for name, c in columns.items()}), sink, compression="snappy")
    return memoryview(sink.getvalue())


def _jsonl(columns: Columns) -> bytes:
    def listed(values: np.ndarray) -> list[Any]:
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            plain = values.astype(object)
            plain[~np.isfinite(values)] = None
            values = plain
        held: list[Any] = values.tolist()
        return held

    def values(column: Column) -> Sequence[Any]:
        if isinstance(column, Ragged):
            return [listed(one) for one in column]
        return listed(column) if isinstance(column, np.ndarray) else column

    rows = zip(*(values(c) for c in columns.values()), strict=True)
    names = list(columns)
    lines = (json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, separators=(",", ":")) for row in rows)
    return "".join(line + "\n" for line in lines).encode()


def _npy(columns: Columns) -> dict[str, bytes | memoryview]:
    files: dict[str, bytes | memoryview] = {}
    for name, column in columns.items():
        if not _FILE_SAFE.fullmatch(name):
            raise DataError(f"output.fields: {name!r} cannot be in a file name; expected letters, digits and _ . -")
        if isinstance(column, Ragged):
            raise DataError(
                f"output.fields: {name} has as many values as a text has tokens, which npy cannot hold; "
                f"expected format {either(LISTS)}"
            )
        array = column if isinstance(column, np.ndarray) else np.array(column, dtype=np.str_)
        sink = io.BytesIO()
        np.save(sink, array, allow_pickle=False)
        files[f".{name}.npy"] = sink.getbuffer()
    return files
