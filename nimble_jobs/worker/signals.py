"""SIGTERM, SIGINT and a time limit as a descriptor to wait on, or as a count to check between batches."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Counts SIGTERM and SIGINT while it is entered; its `fileno` becomes readable at each. Main thread only.

    `limit_s` after it was entered, the process is asked to stop as by a first signal. Nobody can set this clock.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.count = 0
        self.time_over = False
        self._limit_s = limit_s
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def __enter__(self) -> Self:
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in _NUMBERS}
        if self._limit_s is not None:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, old in self._before.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(self._fd_before)
        self._read.close()
        self._write.close()

    @property
    def asked(self) -> bool:
        """Whether the process is to stop."""
        return self.count > 0 or self.time_over

    def fileno(self) -> int:
        return self._read.fileno()

    def clear(self) -> None:
        """Make `fileno` unreadable until the next signal. The count stays."""
        try:
            while self._read.recv(64):
                pass
        except BlockingIOError:
            return

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.time_over = True


class Interrupts:
    """The number of SIGINT and SIGTERM so far."""

    count = 0


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Counts SIGINT and SIGTERM; from the second on they raise KeyboardInterrupt."""
    interrupted = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # Python delivers signals to the main thread only
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        interrupted.count += 1
        if interrupted.count > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, old in before.items():
            signal.signal(number, old)
