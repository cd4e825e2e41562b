"""How many threads read and decode."""

from __future__ import annotations

import os


def default_threads() -> int:
    """Threads that decode at once: the cores that this process may use, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0))))
