"""On SIGTERM a child does nothing but write down where its threads are: what one that hangs was last seen doing.

The interpreter's lock is not needed for that, so it works while C code spins.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def to_stderr() -> None:
    """From now on SIGTERM sends the stack of each Python thread to stderr. Main thread only."""
    faulthandler.register(signal.SIGTERM, file=sys.stderr, all_threads=True, chain=False)


@contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Inside the block they are appended to `path`; to stderr where it cannot be opened, and after the block."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        faulthandler.register(signal.SIGTERM, file=descriptor, all_threads=True, chain=False)
        yield
    finally:
        to_stderr()
        os.close(descriptor)
