"""The parquet format. Small row groups are read whole and in parallel, large ones from top to bottom in batches.

Files are read, not mapped, so a file that shrinks meanwhile causes an error instead of killing the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nimble_jobs.data import columns
from nimble_jobs.data.blocks import BLOCK_BYTES, Layout
from nimble_jobs.data.several_columns import source_of
from nimble_jobs.data.source import Source
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.table import OpenTable, check_columns, is_plain_text, single_columns
from nimble_jobs.data.text.fixed import AsTokens
from nimble_jobs.errors import DataError
from nimble_jobs.regular import name_of, open_regular
from nimble_jobs.spec.model import InputSpec

T = TypeVar("T")

_READ_BYTES = 1 << 20  # bytes of a column read at a time, if a row group is larger than a block
_LEVELS = 4  # bytes per number in a list while it is decoded
_INDEX = 4  # bytes per value of a column whose equal values are held once
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "INT96": 8}


def open_parquet(spec: InputSpec, path: Path, tokens: AsTokens | None = None) -> Source:
    """Rows of one Parquet file. `tokens` says how a text becomes tokens, if it is one of several inputs.

    Raises DataError if the file or a column is missing or unreadable, and what `tokens` raises.
    """
    return opened_as(partial(source_of, tokens=tokens), spec, path)


def opened_as(make: Callable[[InputSpec, Stamp, OpenTable], T], spec: InputSpec, path: Path) -> T:
    """What `make` makes of the rows of one Parquet file. Raises DataError."""
    stamp = Stamp.of(path)
    try:
        with open_regular(path) as opened, pq.ParquetFile(name_of(opened)) as file:
            schema, metadata = file.schema_arrow, file.metadata
            names, extra = check_columns(spec, path, schema.names)
            if spec.format != "text":  # paths of pictures, perhaps
                texts = [name for name in single_columns(spec).values() if name in names]
                extra += [n for n in texts if n not in extra and is_plain_text(schema.field(n).type)]
            held = file.read(columns=extra) if extra else pa.table({})
        widths = [_width(schema.field(name).type) for name in names]
        pieces = _pieces(metadata, dict(zip(names, widths, strict=True)))
        paths = [columns.bytes_path(name, schema.field(name).type) for name in names]
        blocks = _Blocks(stamp, metadata, names, pieces, once=[p for p in paths if p])
        table = OpenTable(names=names, schema=schema, layout=_layout(pieces), read=blocks.read, extra=held)
        return make(spec, stamp, table)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read ({e}); expected a complete .parquet file") from e


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A block: whole row groups, or some rows of a large one."""

    groups: tuple[int, ...]
    first: int  # first row in the group
    rows: int
    whole: bool  # whether it holds all rows of its groups
    nbytes: int  # bytes once decoded, approximately
    making_bytes: int  # bytes while it is decoded, approximately


def _pieces(metadata: pq.FileMetaData, widths: Mapping[str, int]) -> list[_Piece]:
    """The division of row groups into blocks of about BLOCK_BYTES."""
    pieces: list[_Piece] = []
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        nbytes, making = _decoded_bytes(metadata.row_group(group), widths)
        last = pieces[-1] if pieces else None
        if rows == 0:
            continue
        if last is not None and last.whole and last.nbytes + nbytes <= BLOCK_BYTES // 4:  # join many tiny groups
            pieces[-1] = _Piece(
                groups=(*last.groups, group),
                first=0,
                rows=last.rows + rows,
                whole=True,
                nbytes=last.nbytes + nbytes,
                making_bytes=last.making_bytes + making,
            )
        elif nbytes <= 2 * BLOCK_BYTES:
            pieces.append(_Piece(groups=(group,), first=0, rows=rows, whole=True, nbytes=nbytes, making_bytes=making))
        else:
            step = max(1, BLOCK_BYTES * rows // nbytes)
            pieces += [
                _Piece(
                    groups=(group,),
                    first=first,
                    rows=min(step, rows - first),
                    whole=False,
                    nbytes=nbytes * min(step, rows - first) // rows,
                    making_bytes=making * min(step, rows - first) // rows,
                )
                for first in range(0, rows, step)
            ]
    return pieces


def _decoded_bytes(group: pq.RowGroupMetaData, widths: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of these columns in memory, and bytes for decoding them: pages, stored values, and levels of lists.

    Numbers count by their number, since their encoding may be far smaller.
    """
    total = making = 0
    for i in range(group.num_columns):
        column = group.column(i)
        path = column.path_in_schema
        width = widths.get(path, widths.get(path.partition(".")[0]))
        if width is None and "." in path:
            width = next((width for name, width in widths.items() if path.startswith(f"{name}.")), None)
        if width is None:
            continue
        if width:
            total += column.num_values * width
            making += column.num_values * (width + _WIDTHS.get(column.physical_type, 0) + _LEVELS)
        else:
            total += column.total_uncompressed_size + column.num_values * _INDEX
            making += 2 * column.total_uncompressed_size
    return total, making


def _width(kind: pa.DataType) -> int:
    """Bytes of one number in a column, inside lists or not; 0 for other types."""
    kind = columns.stored_as(kind)
    while columns.is_list(kind):
        kind = kind.value_type
    return -(-kind.bit_width // 8) if pa.types.is_primitive(kind) else 0


def _layout(pieces: Sequence[_Piece]) -> Layout:
    numbers = [n for n, (_, same) in enumerate(groupby(pieces, key=lambda p: p.groups)) for _ in same]
    return Layout(
        starts=np.cumsum([0, *(p.rows for p in pieces)], dtype=np.int64),
        chains=np.array(numbers, dtype=np.int64),
        block_bytes=max((p.nbytes for p in pieces), default=1),
        making_bytes=max((p.making_bytes for p in pieces), default=1),
    )


class _Blocks:
    """Reads blocks of one file, several at a time. Files are open only while they are read.

    Equal values in the columns `once` are held once per page's dictionary, as in the file. Otherwise a megabyte of file
    could become gigabytes of images.
    """

    def __init__(
        self,
        stamp: Stamp,
        metadata: pq.FileMetaData,
        names: list[str],
        pieces: list[_Piece],
        *,
        once: list[str],
    ) -> None:
        self._stamp, self._metadata, self._names, self._pieces, self._once = stamp, metadata, names, pieces, once
        self._lock = threading.Lock()
        self._rows: dict[int, _Rows] = {}  # by row group, for groups that are read from top to bottom

    def read(self, number: int) -> pa.Table:
        """The rows of a block. Raises DataError."""
        piece = self._pieces[number]
        try:
            if piece.whole:
                with self._open() as file:  # one by one, because pyarrow cannot join structures of dictionary values
                    groups = [file.read_row_group(n, columns=self._names, use_threads=False) for n in piece.groups]
                table = pa.concat_tables(groups)
            else:
                table = self._some(piece)
            if table.num_rows != piece.rows:
                raise pa.ArrowInvalid(f"it holds {table.num_rows} rows; the file's footer says {piece.rows}")
            return table
        except (pa.ArrowException, OSError) as e:
            which = "group " + str(piece.groups[0])
            if len(piece.groups) > 1:
                which = f"groups {piece.groups[0]} to {piece.groups[-1]}"
            raise DataError(f"{self._stamp.path}: row {which} cannot be read ({e})") from e

    def _some(self, piece: _Piece) -> pa.Table:
        (group,) = piece.groups
        with self._lock:
            if group not in self._rows:
                self._rows[group] = _Rows(self, group)
            rows = self._rows[group]
        table = rows.take(piece.first, piece.rows)
        if piece.first + piece.rows == self._metadata.row_group(group).num_rows:
            with self._lock:
                self._rows.pop(group, None)
        return table

    def batches(self, group: int, rows: int) -> Iterator[pa.RecordBatch]:
        """Batches of `rows` rows of a row group, from its first row on."""
        with self._open(buffer_size=_READ_BYTES) as file:
            yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=self._names, use_threads=False)

    def _open(self, buffer_size: int = 0) -> pq.ParquetFile:
        with self._stamp.open() as opened:
            return pq.ParquetFile(
                name_of(opened),
                metadata=self._metadata,
                buffer_size=buffer_size,
                read_dictionary=self._once,
                page_checksum_verification=True,  # where the file has checksums
            )


class _Rows:
    """The rows of a large row group in order. To go back, the group is read again from its beginning."""

    def __init__(self, blocks: _Blocks, group: int) -> None:
        self._blocks, self._group = blocks, group
        self._lock = threading.Lock()
        self._at = 0  # the next row
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._left: pa.RecordBatch | None = None  # rows from `_at` on

    def take(self, first: int, count: int) -> pa.Table:
        with self._lock:
            if self._batches is None or first < self._at:
                self._batches, self._left, self._at = self._blocks.batches(self._group, count), None, 0
            parts: list[pa.RecordBatch] = []
            while count:
                batch = self._left if self._left is not None else next(self._batches, None)
                if batch is None:
                    raise pa.ArrowInvalid("it ends before the last row that the file's footer names")
                skip = min(first - self._at, batch.num_rows)
                used = min(count, batch.num_rows - skip)
                if used:
                    parts.append(batch.slice(skip, used))
                self._at += skip + used
                first, count = first + used, count - used
                rest = batch.slice(skip + used)
                self._left = rest if rest.num_rows else None
            return pa.Table.from_batches(parts)
