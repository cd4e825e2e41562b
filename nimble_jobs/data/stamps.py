"""Stamps tell whether a file is still the one that was opened. For many files they take 24 bytes and a name each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import overload

import numpy as np

from nimble_jobs.data.ids import Ids
from nimble_jobs.data.looking import facts_of
from nimble_jobs.decoding.work import Files, signed
from nimble_jobs.errors import DataError
from nimble_jobs.regular import NotRegular, check_regular, open_regular
from nimble_jobs.seen import CHANGED, VANISHED, InputFile

_STEP = 4096  # files that are converted to text at a time


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The state of a file. Stamps are equal only if the file was neither written to nor replaced."""

    path: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str | Path) -> Stamp:
        """The stamp of a file. Raises DataError if it does not exist or is not a regular file."""
        try:
            info = os.stat(path)  # noqa: PTH116  # one of a million
            check_regular(path, info.st_mode)
        except NotRegular as e:
            raise DataError(f"{path}: {e}") from e
        except OSError as e:
            raise DataError(f"{path}: {os.strerror(e.errno or 0)}; expected a readable file") from e
        return cls(path=str(path), size=info.st_size, mtime_ns=info.st_mtime_ns, inode=info.st_ino)

    def trouble(self) -> str | None:
        """VANISHED or CHANGED if the file is no longer the listed one; else None."""
        try:
            return None if Stamp.of(self.path) == self else CHANGED
        except DataError:
            return VANISHED

    def check(self) -> None:
        """Raises DataError if the file has changed or vanished."""
        try:
            now = Stamp.of(self.path)
        except DataError as e:
            raise self.vanished() from e
        if now != self:
            raise self.changed()

    def changed(self) -> DataError:
        """The error for a changed file."""
        return DataError(f"{self.path}: changed while it was read")

    def vanished(self) -> DataError:
        """The error for a vanished file."""
        return DataError(f"{self.path}: vanished while it was read")

    def check_open(self, descriptor: int) -> None:
        """Raises DataError if an open file is not this one, or has changed."""
        now = os.fstat(descriptor)
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (self.size, self.mtime_ns, self.inode):
            raise self.changed()

    def open(self) -> BufferedReader:
        """Open the file. Raises DataError if it has changed."""
        try:
            file = open_regular(self.path)
        except OSError as e:
            raise self.vanished() from e
        try:
            self.check_open(file.fileno())
        except BaseException:
            file.close()
            raise
        return file


class Names(Ids):
    """Paths, held as bytes in a row."""

    def __init__(self, names: Iterable[str]) -> None:
        held = list(names)
        self._hold(os.fsencode("\0".join(held)), len(held))

    @classmethod
    def of_blob(cls, blob: bytes, count: int) -> Names:
        """So many paths from `blob`. Raises ValueError if it holds another number of them."""
        self = cls.__new__(cls)
        self._hold(blob, count)
        return self

    def _hold(self, blob: bytes, count: int) -> None:
        super().__init__(())
        self._blob = blob
        self._ends = np.zeros(count + 1, dtype=np.int64)
        if count:
            self._ends[1:-1] = np.flatnonzero(np.frombuffer(blob, dtype=np.uint8) == 0) + 1
            self._ends[-1] = len(blob) + 1

    def __len__(self) -> int:
        return len(self._ends) - 1

    def _several(self, at: range) -> list[str]:
        if not at:
            return []
        return os.fsdecode(self._blob[self._ends[at[0]] : self._ends[at[-1] + 1] - 1]).split("\0")[:: at.step]

    @property
    def blob(self) -> bytes:
        """All of them in a row, with a zero byte between two."""
        return self._blob

    @property
    def encoded(self) -> list[bytes]:
        """All of them as bytes."""
        return self._blob.split(b"\0") if len(self) else []

    def joined(self, indexes: np.ndarray) -> bytes:
        """Some of them as bytes, with a zero byte between two."""
        if not len(indexes):
            return b""
        begins, ends = self._ends[indexes], self._ends[indexes + 1] - 1
        if bool((np.diff(indexes) == 1).all()):
            return self._blob[begins[0] : ends[-1]]
        return b"\0".join(self._blob[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True))


class Stamps(Sequence[Stamp]):
    """Stamps of files below one folder. An unreadable file has size -1."""

    def __init__(self, root: Path, names: Names, facts: np.ndarray) -> None:
        self._root = root
        self._before = _before(root)
        self._names = names
        self._facts = facts  # int64 [n, 3]: size, time of change in ns, inode

    @property
    def largest(self) -> int:
        """Bytes of the largest file."""
        return int(self._facts[:, 0].max(initial=0))

    @classmethod
    def of(cls, root: Path, names: Names) -> Stamps:
        """The current stamps of files."""
        before = _before(root)
        return cls(root, names, facts_of(os.fsencode(before), names.encoded))

    @classmethod
    def listed(cls, root: Path, files: Sequence[InputFile]) -> Stamps:
        """The stamps of files from their listing."""
        facts = [(file.size, file.mtime_ns, signed(file.inode)) for file in files]
        return cls(root, Names(file.path for file in files), np.array(facts, dtype=np.int64).reshape(-1, 3))

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    @property
    def names(self) -> Names:
        """Paths below the folder."""
        return self._names

    @property
    def facts(self) -> np.ndarray:
        """int64 [n, 3]: size in bytes, time of change in ns, and inode of each file."""
        return self._facts

    def __len__(self) -> int:
        return len(self._facts)

    @overload
    def __getitem__(self, index: int) -> Stamp: ...
    @overload
    def __getitem__(self, index: slice) -> list[Stamp]: ...
    def __getitem__(self, index: int | slice) -> Stamp | list[Stamp]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        size, mtime_ns, inode = self._facts[index].tolist()
        return Stamp(path=self._before + self._names[index], size=size, mtime_ns=mtime_ns, inode=_unsigned(inode))

    def files(self, indexes: np.ndarray) -> Files:
        """Some of them, for those who decode."""
        return Files(before=self._before, names=self._names.joined(indexes), facts=self._facts[indexes])

    def moved(self) -> dict[str, str]:
        """Files that have VANISHED or CHANGED, by their path below the folder."""
        now = Stamps.of(self._root, self._names)._facts
        rows = np.flatnonzero((now != self._facts).any(axis=1)).tolist()
        return {self._names[i]: VANISHED if now[i, 0] < 0 else CHANGED for i in rows}

    def folders(self) -> np.ndarray:
        """The name of each file's folder, as objects [n]; equal names share memory. If some files lie in folders below
        the top one, those right in it have None.
        """
        known: dict[str, str] = {}
        held = np.empty(len(self), dtype=object)
        top = None if b"/" in self._names.blob else Path(self._before).name
        for a in range(0, len(self), _STEP):
            for i, name in enumerate(self._names[a : a + _STEP], start=a):
                folder = name.rpartition("/")[0].rpartition("/")[2] if "/" in name else top
                held[i] = None if folder is None else known.setdefault(folder, folder)
        return held

    def lines(self) -> Iterator[bytes]:
        """The bytes for a fingerprint, many files at a time."""
        line = self._before.replace("%", "%%") + "%s\0%d\0%d\0%d\n"
        for a in range(0, len(self), _STEP):
            names, facts = self._names[a : a + _STEP], self._facts[a : a + _STEP]
            values = np.empty((len(names), 4), dtype=object)
            values[:, 0] = names
            values[:, 1:3] = facts[:, :2]
            values[:, 3] = facts[:, 2].view(np.uint64)
            yield (line * len(names) % tuple(values.ravel().tolist())).encode(errors="surrogateescape")


class WithNamed(Sequence[Stamp]):
    """The stamp of a table, and then those of the files that it names."""

    def __init__(self, table: Stamp, named: Sequence[Stamps]) -> None:
        self._table, self._named = table, tuple(named)

    def __len__(self) -> int:
        return 1 + sum(map(len, self._named))

    @overload
    def __getitem__(self, index: int) -> Stamp: ...
    @overload
    def __getitem__(self, index: slice) -> list[Stamp]: ...
    def __getitem__(self, index: int | slice) -> Stamp | list[Stamp]:
        wanted = range(len(self))[index]
        if not isinstance(wanted, int):
            return [self[i] for i in wanted]
        at = wanted - 1
        for stamps in self._named if wanted else ():
            if at < len(stamps):
                return stamps[at]
            at -= len(stamps)
        return self._table


def shared(one: Sequence[Stamp], other: Sequence[Stamp]) -> list[int]:
    """The places in `one` of files that are in `other` too, under whatever path: with equal size, time and inode."""
    mine, theirs = (_facts(stamps) for stamps in (one, other))
    row = [(name, np.int64) for name in ("size", "time", "inode")]
    both = np.isin(mine.view(row).ravel(), theirs.view(row).ravel())
    return [int(i) for i in np.flatnonzero(both & (mine[:, 0] >= 0))]


def _facts(stamps: Sequence[Stamp]) -> np.ndarray:
    if isinstance(stamps, Stamps):
        return np.ascontiguousarray(stamps.facts)
    facts = [(stamp.size, stamp.mtime_ns, signed(stamp.inode)) for stamp in stamps]
    return np.array(facts, dtype=np.int64).reshape(-1, 3)


def fingerprint(stamps: Iterable[Stamp]) -> str:
    """A digest of the files; equal only if none was written, replaced or renamed."""
    digest = hashlib.sha256()
    if isinstance(stamps, Stamps):
        for some in stamps.lines():
            digest.update(some)
        return digest.hexdigest()
    for s in stamps:
        digest.update(f"{s.path}\0{s.size}\0{s.mtime_ns}\0{s.inode}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _before(root: Path) -> str:
    """How the paths of files below a folder begin."""
    return "" if str(root) == "." else f"{str(root).rstrip('/')}/"


def _unsigned(inode: int) -> int:
    return inode + (1 << 64) if inode < 0 else inode
