"""Says on the job what a training builds, so that its user knows what it waits for, and adds up how long that takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nimble_jobs.workloads.context import Event, Stopped


class Building:
    """The builds of one attempt, one after another."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self.seconds = 0.0  # of all builds so far

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Build inside. If the job is ended meanwhile, an event says what it was building."""
        self._event("building", f"builds {what}", {})
        start = time.perf_counter()
        try:
            yield
        except Stopped:
            took = time.perf_counter() - start
            self._event("stopped", f"after {took:.1f} s of building {what}", {"built_s": took})
            raise
        finally:
            self.seconds += time.perf_counter() - start
