"""The interface of every format for the reader: count, signature, ids, labels, and `load` for records by position."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data.blocks import Block, Give, Layout, join_layouts
from nimble_jobs.data.ids import Ids, JoinedIds
from nimble_jobs.data.records import Signature
from nimble_jobs.data.stamps import Stamp
from nimble_jobs.decoding.work import COLUMNS
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


class Joined:
    """Several sources in a row, all with the signature of `first`."""

    def __init__(self, parts: Sequence[Source], first: Source | None = None) -> None:
        first = first or parts[0]
        self.packing = packing_of(first)
        for part in parts:
            _check_packing(packing_of(part), self.packing, part, first)
            if part.signature != first.signature:
                mends = ", or transform.scale: 1 for float32" if part.signature.shape == first.signature.shape else ""
                raise DataError(
                    f"{part.stamps[0].path}: records are {part.signature.dtype} {part.signature.shape}; "
                    f"expected {first.signature.dtype} {first.signature.shape}, as in {first.stamps[0].path}{mends}"
                )
        self.parts = parts
        self.lines = first.lines
        self._starts = np.cumsum([0, *(p.total for p in parts)])
        self.total = int(self._starts[-1])
        self.signature = first.signature
        self.ids: Ids | None = None
        if first.ids is not None:
            self.ids = JoinedIds([p.ids for p in parts if p.ids is not None])
        self.labels: np.ndarray | None = None
        if first.labels is not None:
            stored = [p.labels for p in parts if p.labels is not None]
            kinds = {s.dtype.kind for s in stored}
            same = len(kinds) == 1 or kinds <= set("biuf")  # whole numbers are fractions where one is missing
            self.labels = np.concatenate(stored if same else [s.astype(object) for s in stored])
        self.stamps = tuple(s for p in parts for s in p.stamps)
        self.piece = first.piece
        self.preprocess = first.preprocess if all(p.preprocess == first.preprocess for p in parts) else None

        layouts = [p.layout for p in parts]
        blocked = [one for one in layouts if one is not None]
        self.layout = join_layouts(blocked) if len(blocked) == len(parts) else None
        self.notes = tuple(note for part in parts for note in part.notes)
        self._blocks = np.cumsum([0, *(one.count for one in blocked)])

    def part_of(self, index: int) -> int:
        """Which part holds a record."""
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def place(self, index: int) -> str:
        part = self.part_of(index)
        return self.parts[part].place(index - int(self._starts[part]))

    def block(self, number: int) -> Block:
        part = int(np.searchsorted(self._blocks, number, side="right")) - 1
        return self.parts[part].block(number - int(self._blocks[part]))

    def load(
        self,
        indexes: np.ndarray,
        wanted: Wanted = READY,
        *,
        into: np.ndarray | None = None,
        give: Give | None = None,
    ) -> Loaded:
        of = np.searchsorted(self._starts, indexes, side="right") - 1
        if len(of) and bool((of == of[0]).all()):
            return self._load(int(of[0]), indexes, wanted, into, give)
        if into is None:
            form = form_of(self, stored=wanted.stored)
            into = np.empty((len(indexes), *form.shape), dtype=form.dtype)
        x = into
        rows = np.zeros((len(indexes), COLUMNS), dtype=np.int64) if wanted.encoded else None
        good = np.ones(len(indexes), dtype=bool)
        bad: dict[int, str] = {}
        busy_s = 0.0
        for part in np.unique(of).tolist():
            places = np.flatnonzero(of == part)
            together = bool(places[-1] - places[0] == len(places) - 1)
            room = x[places[0] : places[-1] + 1] if together else None
            if wanted.encoded and room is None:
                room = np.empty((len(places), *x.shape[1:]), dtype=np.uint8)
            loaded = self._load(part, indexes[places], wanted, room, give)
            mine = {int(places[i]): reason for i, reason in loaded.bad.items()}
            good[list(mine)] = False
            if rows is not None and loaded.rows is not None:
                rows[places] = loaded.rows
            if not together or (mine and not wanted.encoded):
                x[places if wanted.encoded else places[good[places]]] = loaded.x
            bad.update(mine)
            busy_s += loaded.busy_s or 0.0
        if wanted.encoded:
            return Loaded(x=x, bad=bad, rows=rows, busy_s=busy_s or None)
        return Loaded(x=placed(x[good], x) if bad else x, bad=bad, busy_s=busy_s or None)

    def _load(
        self,
        part: int,
        indexes: np.ndarray,
        wanted: Wanted,
        into: np.ndarray | None,
        give: Give | None,
    ) -> Loaded:
        first = int(self._blocks[part]) if give is not None else 0
        mine = None if give is None else lambda number: give(number + first)
        some = indexes - self._starts[part]
        if wanted.crops is not None:
            wanted = replace(wanted, crops=wanted.crops.behind(int(self._starts[part])))
        return self.parts[part].load(some, wanted, into=into, give=mine)

    def check(self, indexes: np.ndarray) -> None:
        for part in np.unique(np.searchsorted(self._starts, indexes, side="right") - 1).tolist():
            self.parts[part].check(indexes)


def _check_packing(found: Packing | None, expected: Packing | None, part: Source, first: Source) -> None:
    """Raises DataError if two files hold inputs of different types or shapes."""
    if found == expected or found is None or expected is None:
        return
    path, said = next((path, said) for path, said in found.words.items() if said != expected.words[path])
    raise DataError(
        f"{part.stamps[0].path}: records of {path} are {said}; "
        f"expected {expected.words[path]}, as in {first.stamps[0].path}"
    )
