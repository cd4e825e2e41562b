"""What every route works with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from anyio import CapacityLimiter

from nimble_jobs import client
from nimble_jobs.dashboard.gate.keys import Keys
from nimble_jobs.dashboard.stream.hub import Hub
from nimble_jobs.metrics import Gpus
from nimble_jobs.store import Store

T = TypeVar("T")

THREADS = 8  # requests that read the store at once; more would only wait for each other
_MOST_KEPT = 1000
_RECOVER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Desk:
    """The open store, and what the server was started with."""

    store: Store
    keys: Keys
    hub: Hub
    limiter: CapacityLimiter  # of threads that read the store
    read_only: bool
    gpus: Gpus = field(default_factory=Gpus)
    _kept: dict[str, tuple[float, Any]] = field(default_factory=dict)  # by name, until when and what
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def recover(self) -> None:
        """End attempts whose process died, every few seconds, as `ls` does. Without a worker nothing else notices."""
        if not self.read_only:
            self.kept("recovered", _RECOVER_S, lambda: client.recover(self.store))

    def kept(self, name: str, seconds: float, make: Callable[[], T]) -> T:
        """What `make` returned at most so long ago. For what is slow to find out and the same for every page."""
        now = time.monotonic()
        with self._lock:
            until, value = self._kept.get(name, (0.0, None))
        if now < until:
            return cast(T, value)
        value = make()
        with self._lock:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[name] = (now + seconds, value)
        return value
