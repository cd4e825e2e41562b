"""Where the time of a search goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Stage = Literal["record", "plan", "capture", "check", "measure"]  # compilers run while a model is recorded
_ON_DEVICE = ("capture", "check", "measure")

_rest: ContextVar[Callable[[float], None] | None] = ContextVar("rest", default=None)


@contextmanager
def resting(rest: Callable[[float], None]) -> Iterator[None]:
    """Inside the block, this thread calls `rest` after each stage that used the device, with the stage's seconds.

    So a build that shares the device can leave it to others for a while.
    """
    before = _rest.set(rest)
    try:
        yield
    finally:
        _rest.reset(before)


class Clock:
    """Sums seconds by stage."""

    def __init__(self) -> None:
        self._seconds: dict[Stage, float] = dict.fromkeys(("record", "plan", "capture", "check", "measure"), 0.0)

    @contextmanager
    def time(self, stage: Stage) -> Iterator[None]:
        """Count the time inside, even if it ends in an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[stage] += seconds
            rest = _rest.get()
            if rest is not None and stage in _ON_DEVICE:
                rest(seconds)

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """Each stage with its seconds, in the order of their first turn."""
        return tuple(self._seconds.items())
