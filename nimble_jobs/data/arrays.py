"""The npy and npz formats. Large uncompressed arrays stay in their file; others are read whole and checked by CRC."""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from nimble_jobs.data import memory
from nimble_jobs.data.blocks import Block, Give, Kept, Layout, as_slice, keep_bytes
from nimble_jobs.data.ids import Ids, as_ids
from nimble_jobs.data.rows import FileRows, FortranRows
from nimble_jobs.data.source import READY, Loaded, Wanted, form_of, placed, record_of, unknown_field
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.data.transform import bind
from nimble_jobs.errors import DataError
from nimble_jobs.regular import open_regular
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.spec.units import format_bytes

# Smaller arrays are read whole: that is as fast, is checked by CRC, and is safe from later changes of the file.
LEAVE_FROM_BYTES = 16 << 20
_READ_BYTES = 1 << 20  # bytes of an archive read at a time
_SMALL_BYTES = 1 << 20  # taken without a question for free memory, which reads several files of the kernel
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    EOFError,
    struct.error,
    OSError,
    NotImplementedError,
    RuntimeError,
)
_UNPARSED = ("Cannot parse header", "null bytes")  # numpy's words, and Python's up to 3.11.3


Stored = np.ndarray | FileRows | FortranRows


@dataclass(frozen=True, kw_only=True)
class _Header:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    length: int  # bytes before the first element


class ArraySource:
    """Records along the first axis of one array, held in memory or read from its file on demand."""

    piece = None
    lines = False

    def __init__(
        self,
        spec: InputSpec,
        stamp: Stamp,
        x: Stored,
        ids: Ids | None,
        labels: np.ndarray | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        where = f"{stamp.path}: input.fields.{spec.fields.which}"
        if isinstance(x, np.ndarray) and x.ndim == 0:
            raise DataError(f"{where}: the array has no axes; expected the records along the first axis")
        self._x = x
        shape = x.shape[1:] if isinstance(x, np.ndarray) else x.shape
        self._transform = bind(spec.transform, shape, x.dtype, where)
        self.total = len(x) if isinstance(x, np.ndarray) else x.total
        self.layout: Layout | None = x.layout if isinstance(x, FortranRows) else None
        self._kept = Kept(self.block, keep_bytes)
        self.signature = self._transform.signature
        self.preprocess = self._transform.preprocess
        self.ids = ids
        self.labels = labels
        self.stamps = (stamp,)
        self.notes: tuple[str, ...] = notes

    def place(self, index: int) -> str:
        return record_of(self.stamps[0].path, index)

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        assert not wanted.encoded
        assert wanted.crops is None
        if not wanted.stored:
            x = self._held(indexes, give)
            return Loaded(x=placed(self._transform(x), into))
        form = form_of(self, stored=True)
        if into is None:
            into = np.empty((len(indexes), *form.shape), dtype=form.dtype)
        if isinstance(self._x, FileRows):
            self._x.read(indexes, into)
        else:
            into[...] = self._held(indexes, give)
        return Loaded(x=into)

    def block(self, number: int) -> Block:
        assert isinstance(self._x, FortranRows)
        assert self.layout is not None
        first, last = self.layout.starts[number : number + 2].tolist()
        return self._x.block(first, last)

    def check(self, indexes: np.ndarray) -> None:
        if not isinstance(self._x, np.ndarray):
            self.stamps[0].check()

    def _held(self, indexes: np.ndarray, give: Give | None) -> np.ndarray:
        """These rows as stored; a view if they are consecutive."""
        if isinstance(self._x, np.ndarray):
            return np.asarray(self._x[as_slice(indexes)])
        x = np.empty((len(indexes), *self._x.shape), dtype=self._x.dtype)
        if isinstance(self._x, FileRows):
            self._x.read(indexes, x)
            return x
        assert self.layout is not None
        of = np.searchsorted(self.layout.starts, indexes, side="right") - 1
        for number in np.unique(of).tolist():
            places = np.flatnonzero(of == number)
            rows = indexes[places] - self.layout.starts[number]
            x[as_slice(places)] = (give or self._kept)(number).values[as_slice(rows)]
        return x


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
            held = _read_npy(path, stamp)
            stamp.check()
            return ArraySource(spec, stamp, held, None, None)
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {i.filename.removesuffix(".npy"): i for i in archive.infolist() if i.filename.endswith(".npy")}

            notes: list[str] = []

            def array(which: str, name: str) -> Stored:
                if name not in members:
                    raise unknown_field(path, which, name, members)
                where = f"{path}: input.fields.{which}: {name!r}"
                return _read_member(file, archive, members[name], stamp, where, notes)

            x = array(spec.fields.which, spec.fields.name)
            total = x.total if not isinstance(x, np.ndarray) else len(x) if x.ndim else 0
            where = f"{path}: input.fields.id: {spec.fields.id!r}"
            ids = None if spec.fields.id is None else as_ids(_whole(array("id", spec.fields.id)), total, where)
            labels = None if spec.fields.label is None else array("label", spec.fields.label)
            stamp.check()
            return ArraySource(spec, stamp, x, ids, None if labels is None else _whole(labels), tuple(notes))
    except DataError:
        raise
    except _BROKEN as e:
        raise DataError(f"{path}: cannot be read ({e}); expected a complete .{spec.format} file") from e


def _whole(x: Stored) -> np.ndarray:
    """The array in memory."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, FortranRows):
        return np.ascontiguousarray(x.block(0, x.total).values)
    held = np.empty((x.total, *x.shape), dtype=x.dtype)
    x.read(np.arange(x.total), held)
    return held


def _read_npy(path: Path, stamp: Stamp) -> Stored:
    with open_regular(path) as file:
        header = _header(file, str(path), stamp.size)
        if stamp.size >= LEAVE_FROM_BYTES and _can_stay(header):
            return _left(header, stamp, header.length)
        return _in_memory(file, header, str(path))


def _read_member(
    file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo, stamp: Stamp, where: str, notes: list[str]
) -> Stored:
    with archive.open(info) as member:
        header = _header(member, where, info.file_size)
        plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if not (plain and info.file_size >= LEAVE_FROM_BYTES and _can_stay(header)):
            if not plain and info.file_size >= LEAVE_FROM_BYTES:
                notes.append(f"{where} is compressed, so it is held in memory: {format_bytes(info.file_size)}")
            return _in_memory(member, header, where)
    file.seek(info.header_offset)  # the local header repeats the name and has its own extra field
    name_length, extra_length = struct.unpack("<HH", file.read(30)[26:30])
    return _left(header, stamp, info.header_offset + 30 + name_length + extra_length + header.length)


def _header(file: IO[bytes], where: str, size: int) -> _Header:
    """Reads up to the first element. Raises DataError unless exactly the promised number of bytes follows."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise DataError(f"{where}: has .npy version {version}; expected 1.0 or 2.0")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file)
    except _BROKEN as e:
        if any(said in str(e) for said in _UNPARSED):
            raise ValueError("its header is damaged") from e
        raise
    except Exception as e:  # numpy parses the header as Python code, so broken bytes can raise nearly anything
        raise ValueError("its header is damaged") from e
    if not all(type(n) is int and n >= 0 for n in shape):
        raise DataError(f"{where}: its header gives the shape {shape}; expected sizes of 0 or more")
    if dtype.hasobject:
        raise DataError(f"{where}: holds Python objects; expected numbers or text")
    if dtype.subdtype is not None:
        raise DataError(f"{where}: holds values of type {dtype}; expected numbers or text")
    length = file.tell()
    if size - length != (nbytes := math.prod(shape) * dtype.itemsize):
        raise DataError(f"{where}: holds {size - length} bytes of data; expected {nbytes} for {dtype} {shape}")
    return _Header(dtype=dtype, shape=shape, fortran=fortran, length=length)


def _can_stay(header: _Header) -> bool:
    """Whether rows can be read from the file in place."""
    return bool(header.shape) and math.prod(header.shape) > 0


def _left(header: _Header, stamp: Stamp, offset: int) -> FileRows | FortranRows:
    """The array, left in its file."""
    kind = FortranRows if header.fortran and len(header.shape) > 1 else FileRows
    return kind(stamp=stamp, offset=offset, dtype=header.dtype, total=header.shape[0], shape=header.shape[1:])


def _in_memory(file: IO[bytes], header: _Header, where: str) -> np.ndarray:
    """The array, read whole from the end of its header. Raises DataError if it does not fit into memory."""
    needed = math.prod(header.shape) * header.dtype.itemsize
    if needed > _SMALL_BYTES and needed > (free := memory.available_bytes()):
        raise DataError(
            f"{where}: is compressed and needs {format_bytes(needed)} of memory, but only {format_bytes(free)} is "
            "free; expected less, or an uncompressed array (numpy.savez or numpy.save)"
        )
    x = np.empty(header.shape, dtype=header.dtype, order="F" if header.fortran else "C")
    rest = x.reshape(-1, order="A").view(np.uint8).data if needed else memoryview(b"")
    while rest.nbytes:
        data = file.read(min(rest.nbytes, _READ_BYTES))
        if not data:
            raise EOFError("it ends too early")
        rest[: len(data)] = data
        rest = rest[len(data) :]
    file.read(1)  # an archive verifies its checksum at the end
    return x
