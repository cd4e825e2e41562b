"""Bytes named by their SHA-256: a file that is there under its name is whole, and every read proves it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nimble_jobs.errors import Damaged, NotFound, StoreError
from nimble_jobs.patience import Lent
from nimble_jobs.store.locks import EXCLUSIVE, SHARED, Lock
from nimble_jobs.whole import sync_path, write_whole

_NAME = re.compile("[0-9a-f]{64}")
# What a read fails with where the file is not what was put. After others (too many open files) it may well be sound.
_BAD = {
    errno.EACCES,
    errno.EBADMSG,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,  # a symbolic link
    errno.ENOTDIR,
    errno.ENXIO,  # a socket
    errno.EUCLEAN,
}
_POLL_S = 0.02
PATIENCE_S = 30.0  # how long a lock is waited for; loading a schedule takes seconds


def check_ours(path: Path, info: os.stat_result) -> None:
    """Raises Damaged for what is no file or folder of ours that nobody else can write to."""
    mode = stat.S_IMODE(info.st_mode)
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        raise Damaged(f"{path}: is neither a file nor a folder")
    if info.st_uid != os.geteuid():
        raise Damaged(f"{path}: belongs to user {info.st_uid}, not to {os.geteuid()}")
    if mode & 0o022:
        raise Damaged(f"{path}: others can write to it (mode {mode:04o})")


class Artifacts:
    """The `artifacts` folder. Files are mode 0600, spread over 256 folders by the first two digits."""

    def __init__(self, folder: Path, patience: Lent | None = None) -> None:
        self._folder = folder
        self._patience = patience or Lent()

    def put(self, data: bytes) -> str:
        """Keep the bytes, durably; returns their SHA-256 in hex. Whatever else lies under that name is replaced."""
        name = hashlib.sha256(data).hexdigest()
        self._patience.through(lambda: self._put(name, data))
        return name

    def _put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            self._make_folder(path.parent)
            if not self._sound(name):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)  # no file can take the place of a folder
                write_whole(path, data)
        except OSError as e:
            raise StoreError(f"{path}: {e.strerror}; the artifact was not stored") from e

    def get(self, name: str) -> bytes:
        """The bytes of a SHA-256. Raises NotFound, and Damaged when they are not what was put, or when somebody else
        owns the file or its folder, or could have written to it. Raises StoreError when they could not be looked at.
        """
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                check_ours(path, os.fstat(descriptor))
                check_ours(path.parent, path.parent.lstat())
                data = file.read()
        except FileNotFoundError as e:
            raise NotFound(f"artifact {name}: is not stored") from e
        except OSError as e:
            if e.errno in _BAD:
                raise Damaged(f"{path}: {e.strerror}") from e
            raise StoreError(f"{path}: {e.strerror}; the artifact was not read") from e
        if hashlib.sha256(data).hexdigest() != name:
            raise Damaged(f"{path}: its bytes do not have the SHA-256 that names them")
        return data

    def has(self, name: str) -> bool:
        """Is there a file of that name? Whether it is sound only `get` says."""
        try:
            return self._path(name).is_file()
        except OSError:  # in a folder that we may not look into
            return False

    def size(self, name: str) -> int:
        """Bytes of the file; 0 where there is none, or something else."""
        try:
            info = self._path(name).lstat()
        except OSError:
            return 0
        return info.st_size if stat.S_ISREG(info.st_mode) else 0

    def remove(self, name: str) -> None:
        """Delete what lies under the name, if anything does. For use inside `alone`, where no schedule needs it.

        Raises StoreError.
        """
        path = self._path(name)
        try:
            if path.parent.is_symlink():  # what it leads to is not ours
                path.parent.unlink()
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as e:
            raise StoreError(f"{path}: {e.strerror}; the artifact was not removed") from e

    def names(self) -> Iterator[str]:
        """Every stored SHA-256, sorted. Raises StoreError when the folder cannot be looked at."""
        try:
            return iter(sorted(path.name for path in self._folder.glob("??/*") if _NAME.fullmatch(path.name)))
        except OSError as e:
            raise StoreError(f"{self._folder}: {e.strerror}; its artifacts were not listed") from e

    def strange(self) -> Iterator[str]:
        """One line for each folder of artifacts that is none of ours, so that nothing in it is used.

        The next artifact that belongs there puts a new one in its place. Raises StoreError when it cannot be looked at.
        """
        try:
            for folder in sorted(self._folder.glob("[0-9a-f][0-9a-f]")):
                try:
                    info = folder.lstat()
                    check_ours(folder, info)
                    if not stat.S_ISDIR(info.st_mode):
                        yield f"{folder}: is not a folder"
                    elif stat.S_IMODE(info.st_mode) & 0o700 != 0o700:
                        yield f"{folder}: its mode is {stat.S_IMODE(info.st_mode):04o}; expected 0700"
                except Damaged as e:
                    yield str(e)
        except OSError as e:
            raise StoreError(f"{self._folder}: {e.strerror}; its folders were not listed") from e

    def _sound(self, name: str) -> bool:
        try:
            self.get(name)
        except (NotFound, Damaged):
            return False
        return True

    def _make_folder(self, folder: Path) -> None:
        """A folder of ours, mode 0700, also where something else lies in its place."""
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            info = folder.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
                if stat.S_IMODE(info.st_mode) != 0o700:
                    folder.chmod(0o700)
                return
            if stat.S_ISDIR(info.st_mode):  # what is in it belongs to somebody else, and so may its removal
                folder.rename(folder.with_name(f".{folder.name}.{secrets.token_hex(4)}"))
            else:
                folder.unlink()
            folder.mkdir(mode=0o700)
        sync_path(self._folder)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """No artifact is deleted inside the block: for whoever reads several, or puts some that no schedule names yet.

        Raises StoreError when somebody deletes for longer than is sane, or where there are no file locks.
        """
        with self._locked(SHARED):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody reads or puts what belongs together inside the block: for whoever deletes artifacts.

        Raises StoreError when others do so for too long.
        """
        with self._locked(EXCLUSIVE):
            yield

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        with Lock(self._folder / ".lock") as lock:
            while not lock.take(kind):
                if time.monotonic() >= deadline:
                    raise StoreError(f"{self._folder}: locked by another process for more than {PATIENCE_S:g} s")
                time.sleep(_POLL_S)
            yield

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise NotFound(f"artifact {name!r}: not a SHA-256 in lower-case hex")
        return self._folder / name[:2] / name
