"""Which signals a process ignores: one that is forked for a test ignores what its parent does, as a started one."""

from __future__ import annotations

import signal
from collections.abc import Collection
from pathlib import Path

_FIXED = {signal.SIGKILL, signal.SIGSTOP}
_PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # Python ignores them as it starts; `subprocess` has them not inherited


def ignored() -> list[int]:
    """The numbers of the signals that this process ignores, as the kernel says: libraries change them behind Python."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mask = int(status["SigIgn"], 16)
    return [int(number) for number in signal.valid_signals() if mask >> (number - 1) & 1]


def ignore(numbers: Collection[int]) -> None:
    """Ignore these, and leave all others to what the kernel does with them, except those that Python set itself."""
    for number in signal.valid_signals() - _FIXED - _PYTHONS:
        signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)
