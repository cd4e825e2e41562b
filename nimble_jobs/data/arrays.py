"""The npy and npz formats. Large arrays that are stored plainly stay in their file; the rest is read whole, with its
checksum.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from nimble_jobs.data.blocks import Give
from nimble_jobs.data.ids import Ids, as_ids
from nimble_jobs.data.rows import FileRows
from nimble_jobs.data.source import Loaded, Unblocked, form_of, placed, record_of, unknown_field
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.transform import bind
from nimble_jobs.errors import DataError
from nimble_jobs.regular import open_regular
from nimble_jobs.spec.model import InputSpec

# An array below this is read whole: that is as fast, checked by CRC, and indifferent to what happens to the file.
LEAVE_FROM_BYTES = 16 << 20
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    struct.error,
    OSError,
    NotImplementedError,
    RuntimeError,
)


@dataclass(frozen=True, kw_only=True)
class _Header:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    length: int  # bytes before the first element


class ArraySource(Unblocked):
    """Records along the first axis of one array: in memory, mapped, or read from its file when they are asked for."""

    piece = None
    lines = False

    def __init__(
        self,
        spec: InputSpec,
        stamp: Stamp,
        x: np.ndarray | FileRows,
        ids: Ids | None,
        labels: np.ndarray | None,
    ) -> None:
        if isinstance(x, np.ndarray) and x.ndim == 0:
            raise DataError(f"{stamp.path}: input.fields.x: has no axes; expected the records along the first axis")
        self._x = x
        shape = x.shape if isinstance(x, FileRows) else x.shape[1:]
        self._transform = bind(spec.transform, shape, x.dtype, f"{stamp.path}: input.fields.x")
        self.total = x.total if isinstance(x, FileRows) else len(x)
        self.signature = self._transform.signature
        self.pixels = self._transform.pixels
        self.preprocess = self._transform.preprocess
        self.ids = ids
        self.labels = labels
        self.stamps = (stamp,)

    def place(self, index: int) -> str:
        return record_of(self.stamps[0].path, index)

    def load(
        self,
        indexes: np.ndarray,
        *,
        raw: bool = False,
        stored: bool = False,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        if not stored:
            x = self._held(indexes)
            return Loaded(x=placed(self._transform.raw(x) if raw else self._transform(x), into))
        form = form_of(self, raw=raw, stored=True)
        if into is None:
            into = np.empty((len(indexes), *form.shape), dtype=form.dtype)
        if isinstance(self._x, FileRows):
            self._x.read(indexes, into)
        else:
            into[...] = self._held(indexes)
        return Loaded(x=into)

    def check(self, indexes: np.ndarray) -> None:
        if isinstance(self._x, FileRows | np.memmap):
            self.stamps[0].check()

    def _held(self, indexes: np.ndarray) -> np.ndarray:
        """These rows as stored: a view if they follow one another in memory."""
        if isinstance(self._x, FileRows):
            x = np.empty((len(indexes), *self._x.shape), dtype=self._x.dtype)
            self._x.read(indexes, x)
            return x
        if isinstance(self._x, np.memmap):
            self.stamps[0].check()
        n = len(indexes)
        run = n > 0 and indexes[-1] - indexes[0] == n - 1 and bool((np.diff(indexes) == 1).all())
        return np.asarray(self._x[indexes[0] : indexes[0] + n] if run else self._x[indexes])


def open_arrays(spec: InputSpec, path: Path) -> ArraySource:
    """An .npy file (`fields.x` does not apply) or arrays of an .npz file by name.

    Raises DataError; pickled objects are never loaded.
    """
    stamp = Stamp.of(path)
    try:
        if spec.format == "npy":
            if other := [k for k in ("id", "label") if getattr(spec.fields, k) is not None]:
                raise DataError(
                    f"{path}: input.fields.{other[0]}: an .npy file holds one array; expected format npz for more"
                )
            return ArraySource(spec, stamp, _read_npy(path, stamp), None, None)
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {i.filename.removesuffix(".npy"): i for i in archive.infolist() if i.filename.endswith(".npy")}

            def array(which: str, name: str) -> np.ndarray | FileRows:
                if name not in members:
                    raise unknown_field(path, which, name, members)
                where = f"{path}: input.fields.{which}: {name!r}"
                return _read_member(file, archive, members[name], stamp, where)

            x = array("x", spec.fields.x)
            total = x.total if isinstance(x, FileRows) else len(x) if x.ndim else 0
            where = f"{path}: input.fields.id: {spec.fields.id!r}"
            ids = None if spec.fields.id is None else as_ids(_whole(array("id", spec.fields.id)), total, where)
            labels = None if spec.fields.label is None else array("label", spec.fields.label)
            return ArraySource(spec, stamp, x, ids, None if labels is None else _whole(labels))
    except DataError:
        raise
    except _BROKEN as e:
        raise DataError(f"{path}: cannot be read ({e}); expected a complete .{spec.format} file") from e


def _whole(x: np.ndarray | FileRows) -> np.ndarray:
    """The array in memory."""
    if isinstance(x, np.ndarray):
        return x
    held = np.empty((x.total, *x.shape), dtype=x.dtype)
    x.read(np.arange(x.total), held)
    return held


def _read_npy(path: Path, stamp: Stamp) -> np.ndarray | FileRows:
    with open_regular(path) as file:
        header = _header(file, str(path), stamp.size)
        if stamp.size >= LEAVE_FROM_BYTES:
            return _left(file, header, stamp, header.length)
        return _from_bytes(header, memoryview(file.read()))


def _read_member(
    file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo, stamp: Stamp, where: str
) -> np.ndarray | FileRows:
    with archive.open(info) as member:
        header = _header(member, where, info.file_size)
    if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1 and info.file_size >= LEAVE_FROM_BYTES:
        file.seek(info.header_offset)  # the local header repeats the name and has its own extra field
        name_length, extra_length = struct.unpack("<HH", file.read(30)[26:30])
        return _left(file, header, stamp, info.header_offset + 30 + name_length + extra_length + header.length)
    return _from_bytes(header, memoryview(archive.read(info))[header.length :])


def _header(file: IO[bytes], where: str, size: int) -> _Header:
    """Reads as far as the first element. Raises DataError unless exactly the bytes that the header speaks of follow."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise DataError(f"{where}: has .npy version {version}; expected 1.0 or 2.0")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise DataError(f"{where}: holds Python objects; expected numbers or text")
    length = file.tell()
    if size - length != (nbytes := math.prod(shape) * dtype.itemsize):
        raise DataError(f"{where}: holds {size - length} bytes of data; expected {nbytes} for {dtype} {shape}")
    return _Header(dtype=dtype, shape=shape, fortran=fortran, length=length)


def _left(file: IO[bytes], header: _Header, stamp: Stamp, offset: int) -> np.ndarray | FileRows:
    """The array where it is. Elements of one record that are far apart are left to the kernel to collect."""
    if not header.shape or math.prod(header.shape) == 0 or (header.fortran and len(header.shape) > 1):
        order = "F" if header.fortran else "C"
        return np.memmap(file, dtype=header.dtype, mode="r", offset=offset, shape=header.shape, order=order)  # type: ignore[call-overload,no-any-return]
    return FileRows(stamp=stamp, offset=offset, dtype=header.dtype, total=header.shape[0], shape=header.shape[1:])


def _from_bytes(header: _Header, data: memoryview) -> np.ndarray:
    flat = np.frombuffer(data, dtype=header.dtype) if len(data) else np.empty(0, header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")
