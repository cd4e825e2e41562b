"""Handles standard streams that are closed, broken, or on a full disk, so that no command ends in a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

BROKEN_PIPE = 141  # a shell's exit code for a program ended by a broken pipe: 128 + SIGPIPE


def present() -> None:
    """Open /dev/null in place of a closed standard stream. Otherwise the next opened file, perhaps a database, would
    get the output of `print`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class Watched:
    """A text stream that remembers its write error, since not every caller passes errors on."""

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
        """Flush a stream. If a write failed, drop its pending and later output, and return the error."""
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
