"""The interface of every format for the reader: count, signature, ids, labels, and `load` for records by position."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data.blocks import Block, Give, Layout
from nimble_jobs.data.ids import Ids
from nimble_jobs.data.records import Signature
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.errors import DataError
from nimble_jobs.packing import Layout as Packing
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.seen import InputFile


@dataclass(frozen=True, kw_only=True)
class Form:
    """The memory layout of a batch's records."""

    shape: tuple[int, ...]  # of one record
    dtype: str  # numpy's name

    @property
    def nbytes(self) -> int:
        """Bytes of one record."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How far to prepare records. By default, until the model can take them."""

    stored: bool = False  # only as far as `preprocess` expects
    encoded: bool = False  # uint8 [n, *], encoded pictures for a device
    crops: RandomCrops | None = None  # random parts of encoded pictures, each resized to the record's size


READY = Wanted()


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """Loaded records: rows of the good ones in the requested order, and the reasons for bad ones."""

    x: np.ndarray  # C-contiguous
    bad: dict[int, str] = field(default_factory=dict)  # position in the request -> reason
    # Of encoded pictures: what lies in each row of x, in which bad ones keep their place; as in `decoding.work.Answer`.
    rows: np.ndarray | None = None
    busy_s: float | None = None  # busy seconds of a process; None: the calling thread did the work


class Source(Protocol):
    """One input. `load` may be called from several threads at once."""

    @property
    def total(self) -> int: ...

    @property
    def signature(self) -> Signature: ...

    @property
    def ids(self) -> Ids | None:
        """The ids; None: the positions as text."""

    @property
    def layout(self) -> Layout | None:
        """The division of records into blocks that are decoded whole; None: each record is read by itself."""

    @property
    def labels(self) -> np.ndarray | None:
        """The labels as stored, one per record."""

    @property
    def stamps(self) -> Sequence[Stamp]:
        """The files that it reads."""

    @property
    def piece(self) -> int | None:
        """Records that one thread decodes at a time; None: a whole batch."""

    @property
    def preprocess(self) -> Preprocess | None:
        """The steps that remain for records that `load` gives as `stored`; None: it does not give such records."""

    @property
    def lines(self) -> bool:
        """Whether messages about a record begin with its `place`, as for lines of text."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users about memory or time."""

    def place(self, index: int) -> str:
        """The place of a record for messages: FILE:LINE, FILE: record N, or an image's file."""

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        """The records at these positions. `wanted.encoded` needs `into`.

        The rows are packed to the beginning of `into` [len(indexes), *shape], C-contiguous and of the form's type.
        `give` returns blocks of the layout; without it, some blocks are kept for reading in any order. Raises DataError
        if the source can no longer be read.
        """
        ...

    def block(self, number: int) -> Block:
        """A block of the layout. Raises DataError if it cannot be read."""

    def check(self, indexes: np.ndarray) -> None:
        """Raises DataError if a file of these records has changed since it was opened."""


def form_of(source: Source, *, stored: bool) -> Form:
    """The memory layout of records from `load`."""
    if stored:
        assert source.preprocess is not None
        return Form(shape=source.preprocess.shape, dtype=source.preprocess.dtype)
    return Form(shape=source.signature.shape, dtype=source.signature.dtype)


def packing_of(source: Source) -> Packing | None:
    """The layout of rows that hold several inputs each; None if there is one input."""
    packing: Packing | None = getattr(source, "packing", None)
    return packing


def placed(x: np.ndarray, into: np.ndarray | None) -> np.ndarray:
    """The rows, copied to the beginning of `into` if it is given."""
    if into is None:
        return np.ascontiguousarray(x)
    into[: len(x)] = x
    return into[: len(x)]


def stamp_of(root: Path, file: InputFile) -> Stamp:
    """The stamp of the file from its listing."""
    return Stamp(path=str(root / file.path), size=file.size, mtime_ns=file.mtime_ns, inode=file.inode)


def is_glob(source: str) -> bool:
    return any(c in source for c in "*?[") and not Path(source).exists()


def list_files(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or the sorted files with these suffixes directly in a folder or matched by a glob.

    Folders among them are left out. Broken links, pipes and the like stay in, and opening one raises DataError. Raises
    DataError if there are no files.
    """
    path = Path(source)
    if is_glob(source):
        paths = sorted(Path(p) for p in glob.glob(source, recursive=True) if not Path(p).is_dir())  # noqa: PTH207  # absolute patterns
        expected = "files that match"
    elif path.is_dir():
        paths = sorted(
            p for p in path.iterdir() if p.suffix.lower() in suffixes and not (p.is_dir() or p.name[0] == ".")
        )
        expected = f"files that end in {' or '.join(suffixes)}"
    else:
        return [path]
    if not paths:
        raise DataError(f"{source}: nothing to read; expected {expected}")
    return paths


def unknown_field(path: str | Path, which: str, name: str, known: Iterable[str]) -> DataError:
    """The error for a field that the input does not have. It lists the existing ones."""
    names = list(known)
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return DataError(f"{path}: input.fields.{which}: no {name!r}; expected one of: {shown or 'there are none'}")


def record_of(path: str | Path, index: int) -> str:
    """The place of a record that is not a line of text."""
    return f"{path}: record {index}"


class Unblocked:
    """A source that reads each record by itself."""

    layout: Layout | None = None
    notes: tuple[str, ...] = ()

    def block(self, number: int) -> Block:
        """There are no blocks."""
        raise AssertionError(f"no block {number}")
