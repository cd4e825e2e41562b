"""A clock for tests of what is measured, which no busy core can slow down."""

from __future__ import annotations


class Clock:
    """Stands for the module `time`. It goes on by a moment at each look, and by what it is told to sleep."""

    def __init__(self, moment_s: float = 1e-5) -> None:
        self.now_s, self._moment_s = 1000.0, moment_s

    def perf_counter(self) -> float:
        self.now_s += self._moment_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
