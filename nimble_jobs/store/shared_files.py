"""Files by relative path, in a folder that several machines see or in an object store."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nimble_jobs.addresses import is_address
from nimble_jobs.errors import NotFound, StoreError
from nimble_jobs.objects import THREADS, Objects, Stat
from nimble_jobs.regular import read_regular
from nimble_jobs.whole import write_whole


@dataclass(frozen=True, kw_only=True)
class SharedFile:
    """What a place says about a file."""

    size: int  # in bytes
    modified_at: float | None  # Unix seconds by the place's clock; None if it does not say


class Files(Protocol):
    """Paths have slashes. Methods raise StoreError, or what `Objects` raises."""

    def read(self, path: str) -> bytes:
        """The bytes. Raises NotFound."""

    def write(self, path: str, data: bytes) -> None:
        """Write a file whole, in place of any other. Folders are made below the place, not above it."""

    def stats(self, paths: Sequence[str]) -> dict[str, SharedFile]:
        """Those of the files that exist."""

    def list(self, folders: re.Pattern[str]) -> dict[str, SharedFile]:
        """Every file that lies in a folder of the place whose name matches. Others are not looked into."""

    def remove(self, paths: Sequence[str]) -> None:
        """Delete files; those that do not exist are no mistake. After an error, some may be gone."""


def open_files(place: str) -> Files:
    """A folder, or an address in an object store. Raises DataError for an address that cannot be used."""
    return _Stored(Objects(place)) if is_address(place) else _Local(Path(place))


class _Local:
    """Links, folders and the like are not listed, so that nobody removes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: str) -> bytes:
        try:
            return read_regular(self._folder / path)
        except FileNotFoundError as e:
            raise NotFound(f"{self._folder / path}: no such file") from e
        except OSError as e:
            raise _error(self._folder / path, e) from e

    def write(self, path: str, data: bytes) -> None:
        file = self._folder / path
        try:
            file.parent.mkdir(exist_ok=True)
            write_whole(file, data, mode=0o644)
        except OSError as e:
            raise _error(file, e) from e

    def stats(self, paths: Sequence[str]) -> dict[str, SharedFile]:
        found = {path: self._stat(self._folder / path) for path in paths}
        return {path: file for path, file in found.items() if file is not None}

    def list(self, folders: re.Pattern[str]) -> dict[str, SharedFile]:
        try:
            inside = sorted(path for path in self._folder.iterdir() if folders.fullmatch(path.name))
            inside = [path for path in inside if path.is_dir() and not path.is_symlink()]
            files = [f"{folder.name}/{file.name}" for folder in inside for file in sorted(folder.iterdir())]
        except OSError as e:
            raise _error(Path(e.filename or self._folder), e) from e
        return self.stats(files)

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                (self._folder / path).unlink(missing_ok=True)
            except OSError as e:
                raise _error(self._folder / path, e) from e

    def _stat(self, file: Path) -> SharedFile | None:
        try:
            info = file.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise _error(file, e) from e
        if not stat.S_ISREG(info.st_mode):
            return None
        return SharedFile(size=info.st_size, modified_at=info.st_mtime)


class _Stored:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def read(self, path: str) -> bytes:
        return self._objects.read(path)

    def write(self, path: str, data: bytes) -> None:
        self._objects.write(path, data)

    def stats(self, paths: Sequence[str]) -> dict[str, SharedFile]:
        if len(paths) <= 1:
            found = [self._stat(path) for path in paths]
        else:
            with ThreadPoolExecutor(min(THREADS, len(paths))) as pool:
                found = list(pool.map(self._stat, paths))
        return {path: file for path, file in zip(paths, found, strict=True) if file is not None}

    def list(self, folders: re.Pattern[str]) -> dict[str, SharedFile]:
        listed = self._objects.list().items()  # one request for a thousand objects; one for each folder would be more
        return {path: _file(info) for path, info in listed if folders.fullmatch(path.partition("/")[0])}

    def remove(self, paths: Sequence[str]) -> None:
        self._objects.remove(paths)

    def _stat(self, path: str) -> SharedFile | None:
        try:
            return _file(self._objects.stat(path))
        except NotFound:
            return None


def _file(info: Stat) -> SharedFile:
    return SharedFile(size=info.size, modified_at=info.modified_at)


def _error(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: {error.strerror}")
