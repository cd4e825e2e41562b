"""Writes the exposition to a file for the textfile collector of Prometheus' node_exporter."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from nimble_jobs.errors import NimbleError, UsageError
from nimble_jobs.whole import written_whole

_MODE = 0o644  # node_exporter runs as another user
_LEFT_OVER_S = 3600.0  # a temporary file that is older than this belongs to a process that was killed
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_textfile(path: Path, option: str) -> None:
    """Raises UsageError, naming `option`, if the file cannot be written: another kind of file, or no folder."""
    if path.suffix != ".prom":
        raise UsageError(f"{option}: found {path.name}; expected a name that ends in .prom, which node_exporter reads")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as e:
        raise UsageError(f"{option}: {path}: {e.strerror}") from e
    if mode is not None and not stat.S_ISREG(mode):
        what = next((words for test, words in _KINDS if test(mode)), "no regular file")
        raise UsageError(f"{option}: {path} is {what}; expected a regular file, or a new name")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}: {path.absolute().parent} is not a folder; make it first")


def write_textfile(path: Path, text: bytes, option: str) -> None:
    """Replace the file as a whole, durably, with mode 0644. Raises what `check_textfile` raises, NimbleError."""
    check_textfile(path, option)
    try:
        _tidy(path)
        with written_whole(path, mode=_MODE) as file:
            os.fchmod(file.fileno(), _MODE)  # whatever the umask is
            file.write(text)
    except OSError as e:
        raise NimbleError(f"{option}: {path} cannot be written: {e.strerror}") from e


def _tidy(path: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    oldest = time.time() - _LEFT_OVER_S
    for left in path.absolute().parent.glob(f".{path.name}.????????"):
        with suppress(FileNotFoundError):
            if left.lstat().st_mtime < oldest:
                left.unlink()
