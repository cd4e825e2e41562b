"""Where the time of a search goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Stage = Literal["record", "plan", "capture", "check", "measure"]  # compilers run while a model is recorded


class Clock:
    """Sums seconds by stage."""

    def __init__(self) -> None:
        self._seconds: dict[Stage, float] = dict.fromkeys(("record", "plan", "capture", "check", "measure"), 0.0)

    @contextmanager
    def time(self, stage: Stage) -> Iterator[None]:
        """Count the time inside, also where it ends in an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - start

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """Each stage with its seconds, in the order of their first turn."""
        return tuple(self._seconds.items())
