"""Measures how busy the stages of a pipeline are, and finds the one that holds up the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a stage has been."""

    name: str
    busy: float  # share of the time in which its workers worked, 0 to 1
    workers: int
    depth: float  # items that waited for the next stage when that asked, on average
    limit: int  # at most so many wait
    items: int
    unit: str = "thread"  # what a worker is


class Meter:
    """Measures what a stage does from now on. Any thread may write, and figures may be read at any time."""

    def __init__(
        self, name: str, *, workers: int = 1, unit: str = "thread", now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.name, self.workers, self.unit, self.limit = name, workers, unit, 0
        self._now = now
        self._lock = threading.Lock()
        self._began = now()
        self._ended: float | None = None
        self._busy_s = 0.0
        self._items = 0
        self._depths = 0
        self._looks = 0

    @contextmanager
    def busy(self, items: int = 1) -> Iterator[None]:
        """A context whose time counts as work of one worker, on so many items."""
        began = self._now()
        try:
            yield
        finally:
            self.worked(self._now() - began, items)

    def worked(self, seconds: float, items: int = 1) -> None:
        """Count seconds of work by one worker, and the items that they produced."""
        with self._lock:
            self._busy_s += seconds
            self._items += items
            self._ended = None  # what was over goes on, as in the next epoch of a training

    def waiting(self, depth: int) -> None:
        """Count a request of the next stage, and how many items were waiting for it."""
        with self._lock:
            self._depths += depth
            self._looks += 1

    def over(self) -> None:
        """Stop the clock: no more work will come."""
        self._ended = self._ended or self._now()

    def load(self) -> Load:
        """The figures so far."""
        with self._lock:
            until = self._ended if self._ended is not None else self._now()
            elapsed = until - self._began
            busy = self._busy_s / (elapsed * self.workers) if elapsed > 0 else 0.0
            return Load(
                name=self.name,
                busy=min(1.0, busy),
                workers=self.workers,
                depth=self._depths / self._looks if self._looks else 0.0,
                limit=self.limit,
                items=self._items,
                unit=self.unit,
            )


def bottleneck(loads: Iterable[Load]) -> Load | None:
    """The busiest stage; None if there are no stages."""
    return max(loads, key=lambda load: load.busy, default=None)
