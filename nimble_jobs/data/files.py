"""Writes files that are complete or absent after a crash. Failures become a DataError that names the path."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from nimble_jobs.errors import DataError, NimbleError
from nimble_jobs.pipeline import Beside
from nimble_jobs.regular import open_regular, read_regular
from nimble_jobs.whole import sync_path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
MANY = 100  # files that are not flushed one by one
_AT_ONCE = 4  # files that are flushed side by side
_TRIES = 100  # tries to remove a folder that others change too
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turns an OSError into a DataError that names the path."""
    try:
        yield
    except NimbleError:  # these may be OSErrors too
        raise
    except OSError as e:
        raise DataError(f"{path}: cannot be written: {e.strerror or e}") from e


def write_file(path: Path, data: bytes | memoryview, *, sync: bool = True) -> None:
    """Write a file beside `path`, sync it, and rename it. The caller syncs the folder once for all its files."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.replace(temporary, path)  # noqa: PTH105 - its method makes a path anew, for its result


def sync_all(paths: Sequence[Path]) -> None:
    """Flush files and folders of one file system to the disk, in any order. Raises OSError.

    Each flush of a file waits for the disk, even if nothing is to be written. So many of them are flushed together with
    everything else in their file system, if the system can, and a few side by side: a journal writes them as one.
    """
    if len(paths) > MANY and _sync_file_system(paths[-1]):
        return
    pieces = [partial(_sync, paths[first::_AT_ONCE]) for first in range(min(_AT_ONCE, len(paths)))]
    others = [Beside(piece, name="nimble-sync") for piece in pieces[1:]]
    works: list[Callable[[], object]] = [*pieces[:1], *(other.wait for other in others)]
    errors = []
    for work in works:
        try:
            work()
        except OSError as e:
            errors.append(e)
    if errors:
        raise errors[0]


def _sync(paths: Sequence[Path]) -> None:
    for path in paths:
        sync_path(path)


def _sync_file_system(path: Path) -> bool:
    """Flush the file system that holds a path. False if the system cannot. Raises OSError."""
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if syncfs(descriptor) == 0:
            return True
        code = ctypes.get_errno()
    finally:
        os.close(descriptor)
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(path))


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file under a second name, or make a synced copy if the file system has no hard links. An existing target
    is replaced.
    """
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        write_file(target, read_regular(source))


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one step. False if the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(a))


def remove_tree(path: Path) -> None:
    """Remove a file or folder, if it exists. Others may remove it, or add to it, at the same time."""
    for left in reversed(range(_TRIES)):
        if not path.is_dir() or path.is_symlink():
            break
        try:
            shutil.rmtree(path)
        except OSError as e:
            # Another process removed one of its files first.
            if not left or e.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
    path.unlink(missing_ok=True)
