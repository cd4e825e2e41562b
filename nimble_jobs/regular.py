"""Opens inputs, which must be regular files. A pipe, a socket or a device in place of one may never answer."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# With these flags, a named pipe opens at once instead of waiting for its writer, and a terminal does not become ours.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class NotRegular(OSError):
    """Something other than a regular file; `strerror` says what it is and what was expected."""

    def __init__(self, path: str | Path, mode: int) -> None:
        self.kind = kind(mode)
        super().__init__(errno.EINVAL, f"is {self.kind}; expected a regular file", str(path))

    def __str__(self) -> str:
        return str(self.strerror)


def kind(mode: int) -> str:
    """What kind of file a mode describes, with its article."""
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def check_regular(path: str | Path, mode: int) -> None:
    """Raise NotRegular, naming `path`, unless `mode` describes a regular file."""
    if not stat.S_ISREG(mode):
        raise NotRegular(path, mode)


def open_regular(path: str | Path) -> BufferedReader:
    """The regular file at `path`, open for reading; links are followed. Never waits.

    Raises NotRegular for any other kind of file, and OSError if it cannot be opened.
    """
    check_regular(path, os.stat(path).st_mode)  # noqa: PTH116 - before it is opened: opening a device can do something
    descriptor = os.open(path, _FLAGS)
    try:
        check_regular(path, os.fstat(descriptor).st_mode)  # it may have been replaced since
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """All bytes of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def name_of(file: BinaryIO) -> str:
    """A path to this very file while it is open, for libraries that open files by name."""
    name = f"/proc/self/fd/{file.fileno()}"
    return name if os.path.exists(name) else str(file.name)  # noqa: PTH110 - a plain question
