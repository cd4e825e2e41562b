"""What the standard streams may be, and still no command ends in a traceback: closed, broken, or on a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

BROKEN_PIPE = 141  # what a shell gives a program that a broken pipe ended: 128 + SIGPIPE


def present() -> None:
    """Puts /dev/null where a standard stream is closed: else the next file that is opened, a database perhaps, would be
    what `print` writes to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class Watched:
    """A text stream that remembers why it could not be written, whoever met that: not every caller hands it on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.refused: OSError | None = None

    def write(self, text: str) -> int:
        with self._watched():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._watched():
            self._stream.flush()

    def settle(self) -> OSError | None:
        """Writes out what is held; where that failed, or fails now, drops it with whatever comes after. Returns why."""
        with suppress(OSError):
            self.flush()
        if self.refused is not None:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, self._stream.fileno())
            os.close(silent)
        return self.refused

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.refused = self.refused or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
