"""What every route works with."""

from __future__ import annotations

from dataclasses import dataclass

from anyio import CapacityLimiter

from nimble_jobs.dashboard.gate.keys import Keys
from nimble_jobs.dashboard.stream.hub import Hub
from nimble_jobs.store import Store

THREADS = 8  # requests that read the store at once; more would only wait for each other


@dataclass(frozen=True, kw_only=True)
class Desk:
    """The open store, and what the server was started with."""

    store: Store
    keys: Keys
    hub: Hub
    limiter: CapacityLimiter  # of threads that read the store
    read_only: bool
