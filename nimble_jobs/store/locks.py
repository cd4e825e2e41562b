"""Locks between processes: `flock` on files that are never deleted. The kernel lets go when the holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nimble_jobs.errors import StoreError

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX


def open_lock(path: Path) -> int:
    """A descriptor of the lock file, made where it is missing. Closing it lets go. Raises StoreError."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}; a worker needs to write here") from e


def try_lock(descriptor: int, kind: int) -> bool:
    """Take a lock (SHARED or EXCLUSIVE) if nobody is in the way. Raises StoreError where there are no file locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        raise StoreError(
            f"the state folder's file system has no file locks ({e.strerror}); choose another with --home"
        ) from e
    return True
