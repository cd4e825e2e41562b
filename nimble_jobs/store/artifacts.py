"""Bytes named by their SHA-256: a file that is there under its name is whole, and every read proves it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from nimble_jobs.errors import Damaged, NotFound, StoreError
from nimble_jobs.store.home import sync_folder, write_whole

_NAME = re.compile("[0-9a-f]{64}")


class Artifacts:
    """The `artifacts` folder. Files are mode 0600, spread over 256 folders by the first two digits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes) -> str:
        """Keep the bytes, durably; returns their SHA-256 in hex. A damaged file of that name is replaced."""
        name = hashlib.sha256(data).hexdigest()
        path = self._path(name)
        try:
            if path.is_file() and path.read_bytes() == data:
                return name
            if not path.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                sync_folder(self._folder)
            write_whole(path, data)
        except OSError as e:
            raise StoreError(f"{path}: {e.strerror}; the artifact was not stored") from e
        return name

    def get(self, name: str) -> bytes:
        """The bytes of a SHA-256. Raises NotFound, and Damaged when they are not what was put."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError as e:
            raise NotFound(f"artifact {name}: is not stored") from e
        except OSError as e:
            raise Damaged(f"{path}: {e.strerror}") from e
        if hashlib.sha256(data).hexdigest() != name:
            raise Damaged(f"{path}: its bytes do not have the SHA-256 that names them")
        return data

    def has(self, name: str) -> bool:
        """Is there a file of that name? Whether it is sound only `get` says."""
        return self._path(name).is_file()

    def names(self) -> Iterator[str]:
        """Every stored SHA-256, sorted."""
        return iter(sorted(path.name for path in self._folder.glob("??/*") if _NAME.fullmatch(path.name)))

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise NotFound(f"artifact {name!r}: not a SHA-256 in lower-case hex")
        return self._folder / name[:2] / name
