"""Locks between processes, on files that are never deleted. The kernel releases a lock when its holder dies.

`exclusive` is a turn that ends with its block; the filelock package takes it. `Lock` is for what filelock does not
offer: shared locks, and a holder that checks whether its file was replaced (docs/decisions/0003-flock.md).

A lock belongs to the process that opened it. `exec` closes it, and so does a fork in the new process: a model may
start processes that outlive it.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from nimble_jobs.errors import StoreError, StoreGone
from nimble_jobs.patience import Lent

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
# Errors of flock on file systems without locks.
_NO_LOCKS = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def exclusive(
    path: Path,
    *,
    poll_s: float,
    limit_s: float = math.inf,
    waiting: Callable[[float], None] = lambda _waited_s: None,
    patience: Lent | None = None,
) -> Iterator[bool]:
    """Inside the block no other process or thread has the lock; False if another one still held it after `limit_s`.

    Meanwhile `waiting` is called every `poll_s` with the seconds waited; what it raises ends the wait. Trouble with the
    file is waited out by `patience`. Raises StoreGone if the folder is missing, and StoreError if the file system has
    no locks: a soft lock, which outlives its holder, never takes their place.
    """
    from filelock import Timeout, UnixFileLock  # here, because most commands take no such lock

    lock = UnixFileLock(path, mode=0o600, fallback_to_soft=False, preserve_lock_file=True)

    def take() -> bool:
        if not path.parent.is_dir():  # filelock would make it, and its parents
            raise StoreGone(f"{path.parent}: is gone; put it back to continue")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        except OSError as e:
            raise (_no_locks(e) if e.errno in _NO_LOCKS else _not_opened(path, e)) from e
        return True

    start = time.monotonic()
    while not (mine := (patience or Lent()).through(take)):
        waited_s = time.monotonic() - start
        if waited_s >= limit_s:
            break
        waiting(waited_s)
        time.sleep(min(poll_s, limit_s - waited_s))
    try:
        yield mine
    finally:
        lock.release()


def _no_locks(error: OSError) -> StoreError:
    return StoreError(
        f"the state folder's file system has no file locks ({error.strerror}); choose another with --home"
    )


def _not_opened(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: {error.strerror}; a worker needs to write here")


_opened: weakref.WeakSet[Lock] = weakref.WeakSet()  # of this process


class Lock:
    """An open lock file, which is created if missing. Closing it releases the lock. Raises StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = self._open()
        _opened.add(self)

    def take(self, kind: int) -> bool:
        """Try to take the lock (SHARED or EXCLUSIVE) without waiting. Raises StoreError if there are no file locks.

        It locks the file that is at the path now: if the file or its folder was replaced, it is opened anew.
        """
        while True:
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.in_place:
                    return False
            except OSError as e:
                raise _no_locks(e) from e
            else:
                if self.in_place:
                    return True
            os.close(self._descriptor)
            self._descriptor = -1
            self._descriptor = self._open()

    @property
    def in_place(self) -> bool:
        """Whether the open file is still the one at the path, not replaced, and neither is its folder."""
        try:
            return self._descriptor >= 0 and os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
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
                # Read access is enough for a lock, if the disk is read-only.
                return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                raise _not_opened(self.path, e) from e


def _let_go() -> None:
    """Close locks in a forked process, since a copied descriptor would hold the lock as long as that process lives."""
    for lock in list(_opened):
        lock.close()


os.register_at_fork(after_in_child=_let_go)
