"""Writes files that other processes see whole or not at all, and that survive a power failure."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Write a file. Other processes see either the old file or the whole new one. Raises OSError."""
    with written_whole(path, mode=mode, durable=durable) as file:
        file.write(data)


@contextmanager
def written_whole(path: Path, *, mode: int = 0o600, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write in the block. It appears, whole, once the block has ended without an error.

    The umask applies to `mode`. Without `durable`, a power failure may bring the old file back. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # several processes may write the same file
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
