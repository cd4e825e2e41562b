"""Which files a model's code reads while it builds the model, so that a later job can tell whether they have changed.

Python tells of each file that it opens (an audit event). Libraries in C++ and Rust open files out of its sight, so
weights that lie beside such a file, or beside the model's own, count as read.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".pt", ".pt2", ".pth", ".bin", ".ckpt", ".h5", ".gguf", ".onnx")
_CODE = (".py", ".pyc", ".so")  # what code decides is in the model's identity
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_DATA = tuple(f"{path}{os.sep}" for path in (*_LIBRARIES, "/proc", "/sys"))
_WRITES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC  # a file that is only opened for reading and writing is read, too

_State = tuple[int, int, int]  # size, time of change in ns, inode
# Threads that do other work, what all others open, and what they write.
_watching: tuple[set[int], dict[str, _State], set[str]] | None = None
_hooked = False


class FilesRead:
    """Files by path, as they were when they were read."""

    def __init__(self, files: dict[str, _State] | None = None) -> None:
        self._files = {} if files is None else files

    @property
    def paths(self) -> list[str]:
        """In the order in which they were read."""
        return list(self._files)

    def changed(self) -> str | None:
        """The path of a file that is another one now, or gone; None if there is none."""
        return next((path for path, state in self._files.items() if state_of(path) != state), None)


@contextmanager
def files_read(beside: Path) -> Iterator[FilesRead]:
    """Note what is read in the block by this thread and those that it starts; complete after its end.

    `beside` is the model's own file.
    """
    global _watching, _hooked
    if not _hooked:
        sys.addaudithook(_hear)  # it stays as long as the process
        _hooked = True
    files: dict[str, _State] = {}
    written: set[str] = set()
    others = {thread.ident for thread in threading.enumerate() if thread.ident is not None} - {threading.get_ident()}
    outer, _watching = _watching, (others, files, written)
    try:
        yield FilesRead(files)
    finally:
        _watching = outer
    for path in written:  # such as a file that is unpacked, read and removed
        files.pop(path, None)
    for folder in {beside.parent, *(Path(path).parent for path in files)}:
        for path in weights_in(folder):
            if path not in written and (state := state_of(path)) is not None:
                files.setdefault(path, state)


def weights_in(folder: Path) -> list[str]:
    """The files of weights right inside of a folder, sorted."""
    found: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        found = sorted(entry.path for entry in entries if entry.name.endswith(WEIGHTS))
    return found


def state_of(path: str) -> _State | None:
    """What tells one state of a regular file from another; None if there is no such file."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _hear(event: str, given: tuple[Any, ...]) -> None:
    if _watching is None or event != "open" or isinstance(given[0], int):
        return
    others, files, written = _watching
    if threading.get_ident() in others:
        return
    name = str(Path(os.fsdecode(given[0])).absolute())
    if given[2] & _WRITES:
        written.add(name)
    elif not name.endswith(_CODE) and not name.startswith(_NOT_DATA) and (state := state_of(name)) is not None:
        files.setdefault(name, state)
