"""Bytes named by their SHA-256. A file under its name is complete, and every read verifies it."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nimble_jobs.errors import Damaged, NimbleError, NotFound, StoreError
from nimble_jobs.patience import Lent
from nimble_jobs.store.locks import EXCLUSIVE, SHARED, Lock
from nimble_jobs.store.shared_artifacts import SharedArtifacts
from nimble_jobs.whole import sync_path, write_whole

log = logging.getLogger(__name__)

_NAME = re.compile("[0-9a-f]{64}")
# Errors that mean that the file is damaged. After other errors, such as too many open files, it may be sound.
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
PATIENCE_S = 30.0  # how long to wait for a lock; loading a schedule takes seconds


def check_ours(path: Path, info: os.stat_result) -> None:
    """Raises Damaged unless it is a file or folder of this user that no other user can write to."""
    mode = stat.S_IMODE(info.st_mode)
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        raise Damaged(f"{path}: is neither a file nor a folder")
    if info.st_uid != os.geteuid():
        raise Damaged(f"{path}: belongs to user {info.st_uid}, not to {os.geteuid()}")
    if mode & 0o022:
        raise Damaged(f"{path}: others can write to it (mode {mode:04o})")


class Artifacts:
    """The `artifacts` folder. Files are mode 0600, spread over 256 folders by the first two digits."""

    def __init__(
        self,
        folder: Path,
        patience: Lent | None = None,
        shared: Callable[[], SharedArtifacts | None] = lambda: None,
    ) -> None:
        """`shared` gives the place from which artifacts of other state folders come, if there is one."""
        self._folder = folder
        self._patience = patience or Lent()
        self._shared = shared

    def put(self, data: bytes) -> str:
        """Store the bytes durably; returns their SHA-256 in hex. Anything else under that name is replaced.

        They are shared too, if that works; if not, the log says so.
        """
        name = hashlib.sha256(data).hexdigest()
        self._patience.through(lambda: self._put(name, data))
        try:
            if (shared := self._shared()) is not None:
                shared.put(name, data)
        except (NimbleError, OSError) as e:
            log.warning("artifact %s was not shared: %s", name, e)
        return name

    def fetch(self, name: str) -> bytes:
        """As `get`; an artifact that this folder lacks is first fetched from where it is shared.

        Raises NotFound, too, if what is shared is damaged or cannot be had now.
        """
        try:
            return self.get(name)
        except NotFound as missing:
            if (data := self._fetched(name, missing)) is None:
                raise
        self._patience.through(lambda: self._put(name, data))
        return data

    def _fetched(self, name: str, missing: NotFound) -> bytes | None:
        """Sound bytes from where artifacts are shared; None if they are not shared."""
        try:
            if (shared := self._shared()) is None:
                return None
            data = shared.get(name)
            if hashlib.sha256(data).hexdigest() == name:
                return data
            shared.remove([name])  # whoever builds it shares it anew
        except NotFound as e:
            raise NotFound(f"{missing}, neither here nor where cache.shared says") from e
        except (NimbleError, OSError) as e:
            raise NotFound(f"{missing} here, and cannot be fetched: {e}") from e
        raise NotFound(f"{missing} here, and the bytes that cache.shared has for it are damaged; they were removed")

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
        """The bytes with a SHA-256. Raises NotFound; Damaged if they have changed, or if another user owns the file or
        its folder or can write to them; StoreError if they cannot be read.
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
            raise Damaged(f"{path}: its bytes have changed (the SHA-256 differs from the name)")
        return data

    def has(self, name: str) -> bool:
        """Whether there is a file of that name. Only `get` tells whether it is sound."""
        try:
            return self._path(name).is_file()
        except OSError:  # in a folder that we may not read
            return False

    def can_have(self, name: str) -> bool:
        """Whether there is a file of that name, here or where artifacts are shared. Raises what that place raises."""
        return self.has(name) or ((shared := self._shared()) is not None and shared.has(name))

    def size(self, name: str) -> int:
        """Bytes of the file; 0 if there is no such file."""
        try:
            info = self._path(name).lstat()
        except OSError:
            return 0
        return info.st_size if stat.S_ISREG(info.st_mode) else 0

    def remove(self, name: str) -> None:
        """Delete the file of that name, if there is one. Call it inside `alone`, if no schedule needs the file.

        Raises StoreError.
        """
        path = self._path(name)
        try:
            if path.parent.is_symlink():  # the target of a link is not ours
                path.parent.unlink()
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as e:
            raise StoreError(f"{path}: {e.strerror}; the artifact was not removed") from e

    def names(self) -> Iterator[str]:
        """Every stored SHA-256, sorted. Raises StoreError if the folder cannot be read."""
        try:
            return iter(sorted(path.name for path in self._folder.glob("??/*") if _NAME.fullmatch(path.name)))
        except OSError as e:
            raise StoreError(f"{self._folder}: {e.strerror}; its artifacts were not listed") from e

    def strange(self) -> Iterator[str]:
        """One line for each folder of artifacts that we do not own, and whose files are therefore not used.

        The next artifact of that folder replaces it. Raises StoreError if it cannot be read.
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
        """Make a folder of ours, mode 0700, in place of anything else of that name."""
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            info = folder.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
                if stat.S_IMODE(info.st_mode) != 0o700:
                    folder.chmod(0o700)
                return
            if stat.S_ISDIR(info.st_mode):  # its contents belong to another user, and we may not be able to remove them
                folder.rename(folder.with_name(f".{folder.name}.{secrets.token_hex(4)}"))
            else:
                folder.unlink()
            folder.mkdir(mode=0o700)
        sync_path(self._folder)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """No artifact is deleted inside the block. For readers of several artifacts, and for writers of new ones that
        no schedule names yet.

        Raises StoreError if a deletion takes too long, or if the file system has no locks.
        """
        with self._locked(SHARED):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process reads or writes artifacts inside the block. For deleting them.

        Raises StoreError if others hold the lock for too long.
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
