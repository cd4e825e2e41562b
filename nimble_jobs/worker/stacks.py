"""On SIGTERM a child writes the stacks of its threads, which show where it hangs, and does nothing else.

This does not need the interpreter's lock, so it works while C code holds it.
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
    """Inside the block stacks are appended to `path`; after it, or if `path` cannot be opened, they go to stderr."""
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
