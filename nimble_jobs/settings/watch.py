"""The configuration for long-running processes: it is read again when the file changes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from nimble_jobs.errors import SettingsError
from nimble_jobs.settings.load import FILE, read_settings
from nimble_jobs.settings.model import Settings

_Stamp = tuple[int, int, int, int] | None


class Watched:
    """The current settings of a state folder. Threads may share it.

    Each access costs one `stat`. If the file is broken, the last good values stay in effect; `problem` says why.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._stamp: _Stamp = None
        self._read: Settings | None = None
        self._without: Settings | None = None  # the settings without a file
        self._error: SettingsError | None = None

    def now(self) -> Settings:
        """The settings. Raises SettingsError if the file is broken and no good one was read before."""
        with self._lock:
            self._look()
            if self._read is None:
                assert self._error is not None
                raise self._error
            return self._read

    def usable(self) -> Settings:
        """The newest valid settings, or those without the file. For a process that must go on. Raises SettingsError
        only for errors in the environment.
        """
        with self._lock:
            self._look()
            if self._read is None and self._without is None:
                self._without = read_settings(self._home, file=False)
            return self._read or self._without or Settings()

    @property
    def problem(self) -> str | None:
        """The problems of the current file, as `config check` prints them; None if the file is in use."""
        with self._lock:
            self._look()
            return None if self._error is None else str(self._error)

    def _look(self) -> None:
        stamp = _stamp(self._home / FILE)
        if stamp == self._stamp and (self._read or self._error):
            return
        try:
            self._read, self._error = read_settings(self._home), None
        except SettingsError as e:
            self._error = e
        self._stamp = stamp


def _stamp(path: Path) -> _Stamp:
    try:
        info = os.stat(path)  # noqa: PTH116 - once a second
    except OSError:
        return None
    return (info.st_mtime_ns, info.st_size, info.st_ino, info.st_dev)
