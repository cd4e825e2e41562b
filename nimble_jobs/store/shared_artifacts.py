"""Where several state folders over one database share artifacts: a folder that all of them see, or an object store.

Nothing there is trusted: whoever reads an artifact compares its SHA-256 with the name, which the database gave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from nimble_jobs.addresses import is_address
from nimble_jobs.errors import NotFound, StoreError
from nimble_jobs.objects import Objects
from nimble_jobs.regular import read_regular
from nimble_jobs.whole import write_whole


class SharedArtifacts(Protocol):
    """Bytes by the name of an artifact. Methods raise StoreError, or what `Objects` raises."""

    def get(self, name: str) -> bytes:
        """The bytes, as they are. Raises NotFound."""

    def has(self, name: str) -> bool: ...

    def put(self, name: str, data: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


def open_shared(place: str) -> SharedArtifacts:
    """A shared folder, or an address in an object store. Raises DataError for an address that cannot be used."""
    return _InObjects(Objects(place)) if is_address(place) else _InFolder(Path(place))


class _InFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> bytes:
        try:
            return read_regular(self._path(name))
        except FileNotFoundError as e:
            raise NotFound(f"{self._path(name)}: no such file") from e
        except OSError as e:
            raise StoreError(f"{self._path(name)}: {e.strerror}") from e

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data, mode=0o644)
        except OSError as e:
            raise StoreError(f"{path}: {e.strerror}") from e

    def remove(self, name: str) -> None:
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as e:
            raise StoreError(f"{self._path(name)}: {e.strerror}") from e

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name


class _InObjects:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def get(self, name: str) -> bytes:
        return self._objects.read(self._name(name))

    def has(self, name: str) -> bool:
        try:
            self._objects.stat(self._name(name))
        except NotFound:
            return False
        return True

    def put(self, name: str, data: bytes) -> None:
        self._objects.write(self._name(name), data)

    def remove(self, name: str) -> None:
        self._objects.remove([self._name(name)])

    def _name(self, name: str) -> str:
        return f"{name[:2]}/{name}"
