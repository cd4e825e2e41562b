"""Locks between processes: `flock` on files that are never deleted. The kernel lets go when the holder dies.

A lock belongs to the process that opened it. `exec` closes it, and so does a plain fork in the new process: a model may
start processes that live on.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from nimble_jobs.errors import StoreError

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX

_opened: weakref.WeakSet[Lock] = weakref.WeakSet()  # of this process


class Lock:
    """An open lock file, made where it is missing. Closing it lets go. Raises StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = self._open()
        _opened.add(self)

    def take(self, kind: int) -> bool:
        """Take it (SHARED or EXCLUSIVE) if nobody is in the way. Raises StoreError where there are no file locks.

        The lock is of the file that has the path now: one whose folder was replaced meanwhile is opened anew.
        """
        while True:
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.in_place:
                    return False
            except OSError as e:
                raise StoreError(
                    f"the state folder's file system has no file locks ({e.strerror}); choose another with --home"
                ) from e
            else:
                if self.in_place:
                    return True
            os.close(self._descriptor)
            self._descriptor = -1
            self._descriptor = self._open()

    @property
    def in_place(self) -> bool:
        """Is the open file still the one that has the path? Not where the file or its folder was replaced."""
        try:
            return self._descriptor >= 0 and os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except OSError:
            return False

    def read(self) -> bytes:
        """What the file holds, but no more than 4 KiB."""
        return os.pread(self._descriptor, 4096, 0)

    def write(self, data: bytes) -> None:
        """Replace what the file holds. A reader between the two steps finds nothing. Raises OSError."""
        os.ftruncate(self._descriptor, 0)
        if data:
            os.pwrite(self._descriptor, data, 0)

    def close(self) -> None:
        """Let go. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)  # enough for a lock, while nothing can be written
            except OSError:
                raise StoreError(f"{self.path}: {e.strerror}; a worker needs to write here") from e


def _let_go() -> None:
    """In a forked process: a copy of a lock's descriptor would hold it for as long as that process lives."""
    for lock in list(_opened):
        lock.close()


os.register_at_fork(after_in_child=_let_go)
