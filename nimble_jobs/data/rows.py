"""Rows of an array that a file holds in memory layout, read straight into the caller's memory.

Files are read with `preadv`, not mapped. So an uncached page costs no fault, and a file that shrinks causes an error
instead of killing the process.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from nimble_jobs.data.blocks import Block, Layout
from nimble_jobs.data.stamps import Stamp

FORTRAN_BYTES = 64 << 20  # bytes of a block of an array in Fortran order

_VECTOR = 1024  # most buffers in one call: IOV_MAX on Linux
_GAP_BYTES = 16 << 10  # reading this many unused bytes costs less than another call
_SPAN_BYTES = 4 << 20  # most bytes read at once into temporary memory


_MINE = threading.local()  # keeps: whether this thread called `keep_open`; kept: the file that it keeps


def keep_open() -> None:
    """Keep the file that this thread read rows from last open until the thread ends, for its next read.

    Opening a file takes five system calls, and each gives up Python's lock, which other threads may then keep. A file
    that somebody replaces meanwhile is read on as it was, so the caller has to check the stamps of what it read.
    """
    _MINE.keeps, _MINE.kept = True, None


class _Kept:
    """A file of this thread; a bare descriptor, because the traceback of an error may outlive the thread."""

    def __init__(self, stamp: Stamp) -> None:
        self.stamp = stamp
        with stamp.open() as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


@contextmanager
def _opened(stamp: Stamp) -> Iterator[int]:
    """The descriptor of a file. Raises DataError if the file has changed."""
    if not getattr(_MINE, "keeps", False):
        with stamp.open() as file:
            yield file.fileno()
        return
    kept: _Kept | None = _MINE.kept
    if kept is None or kept.stamp is not stamp:
        _MINE.kept = None
        _MINE.kept = kept = _Kept(stamp)
    else:
        stamp.check_open(kept.descriptor)
    yield kept.descriptor


@dataclass(frozen=True, kw_only=True, eq=False)
class FileRows:
    """The rows of an array [n, *shape] in C order that begins at `offset` of a file.

    `read` may be called from several threads at once. No file stays open between calls, except in threads that called
    `keep_open`.
    """

    stamp: Stamp
    offset: int  # bytes
    dtype: np.dtype[Any]  # in the byte order of the file
    total: int
    shape: tuple[int, ...]  # of one row

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, indexes: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` [len(indexes), *shape], C-contiguous and of the stored type, with these rows in this order.

        Raises DataError if the file has changed since it was opened, or ends too early.
        """
        n, width = len(indexes), self.row_bytes
        if n == 0 or width == 0:
            return
        rows = out.reshape(n, -1).view(np.uint8)
        with _opened(self.stamp) as descriptor:
            if bool((np.diff(indexes) == 1).all()):
                self._fill(descriptor, [rows.reshape(-1)], int(indexes[0]))
                return
            order = np.argsort(indexes, kind="stable")
            wanted = indexes[order]
            far = np.flatnonzero(np.diff(wanted) * width > width + _GAP_BYTES) + 1
            for a, b in pairwise([0, *far.tolist(), n]):
                self._scatter(descriptor, wanted[a:b], order[a:b], rows)

    def _scatter(self, descriptor: int, wanted: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
        """Read rows `wanted` [n], ascending and close together, into `places` [n] of `rows`."""
        width = self.row_bytes
        if bool((np.diff(wanted) == 1).all()):
            for a in range(0, len(wanted), _VECTOR):
                some = [rows[p] for p in places[a : a + _VECTOR].tolist()]
                self._fill(descriptor, some, int(wanted[a]))
            return
        a = 0
        while a < len(wanted):  # repeated rows, or gaps between them
            first = int(wanted[a])
            b = int(np.searchsorted(wanted, first + max(1, _SPAN_BYTES // width)))
            span = np.empty((int(wanted[b - 1]) + 1 - first, width), dtype=np.uint8)
            self._fill(descriptor, [span.reshape(-1)], first)
            rows[places[a:b]] = span[wanted[a:b] - first]
            a = b

    def _fill(self, descriptor: int, some: list[np.ndarray], first: int) -> None:
        """Fill these buffers in order, from row `first` on."""
        at = self.offset + first * self.row_bytes
        views = [buffer.data for buffer in some]
        while views:
            count = os.preadv(descriptor, views, at)
            if count == 0:
                raise self.stamp.changed()
            at += count
            while views and count >= views[0].nbytes:
                count -= views[0].nbytes
                views.pop(0)
            if count:
                views[0] = views[0][count:]


@dataclass(frozen=True, kw_only=True, eq=False)
class FortranRows:
    """The rows of an array [n, *shape] in Fortran order, in which the values of one row are n elements apart.

    They are read in blocks, with one piece of the file for each value of a row.
    """

    stamp: Stamp
    offset: int  # bytes
    dtype: np.dtype[Any]  # in the byte order of the file
    total: int
    shape: tuple[int, ...]  # of one row, of at least one value

    @property
    def layout(self) -> Layout:
        """Blocks of FORTRAN_BYTES. Each needs as many reads as a row has values."""
        row_bytes = self.dtype.itemsize * math.prod(self.shape)
        step = max(1, FORTRAN_BYTES // row_bytes)
        starts = np.array([*range(0, self.total, step), self.total], dtype=np.int64)
        return Layout(starts=starts, chains=np.arange(len(starts) - 1), block_bytes=step * row_bytes)

    def block(self, first: int, last: int) -> Block:
        """Rows [first, last). Raises DataError if the file has changed since it was opened, or ends too early."""
        width = self.dtype.itemsize
        values = np.empty((*reversed(self.shape), last - first), dtype=self.dtype)
        with self.stamp.open() as file:
            descriptor = file.fileno()
            for r, some in enumerate(values.reshape(-1, last - first)):
                view = some.view(np.uint8).data
                at = self.offset + (r * self.total + first) * width
                while view.nbytes:
                    count = os.preadv(descriptor, [view], at)
                    if count == 0:
                        raise self.stamp.changed()
                    at, view = at + count, view[count:]
        rows = values.transpose()  # a view [last - first, *shape]
        return Block(values=rows, place=np.arange(last - first), bad={}, nbytes=values.nbytes)
