"""How long a thread may keep the interpreter's lock while others wait for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TURN_S = 0.0005  # Python's own 5 ms are longer than a batch takes on a fast device


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside the block threads take turns ten times as often.

    Each call that lets go of the lock, to launch a kernel for instance, must then get it back. A stage that computes in
    Python would hold up the others at every such call.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
