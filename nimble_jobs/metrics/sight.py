"""Everything that one exposition tells, read at one moment."""

from __future__ import annotations

import time
from dataclasses import dataclass

from nimble_jobs.metrics.gpus import Gpu, Gpus
from nimble_jobs.metrics.labels import NAMES
from nimble_jobs.metrics.workers import Worker, read_workers
from nimble_jobs.store import Store
from nimble_jobs.store.figures import Figures


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The values behind the metrics."""

    figures: Figures
    workers: list[Worker]
    firing: int  # processes that fire timers
    gpus: list[Gpu]
    gpu_errors: int | None  # figures that a driver did not give; None without a driver
    took_s: float  # how long reading all this took


def look(store: Store, gpus: Gpus, now: float) -> Sight:
    """Read the store and the GPUs at `now`, in Unix seconds. Raises StoreError."""
    start = time.perf_counter()
    figures = store.figures(now, names=NAMES)
    workers, firing = read_workers(store, figures)
    found, errors = gpus.read()
    return Sight(
        figures=figures,
        workers=workers,
        firing=firing,
        gpus=found,
        gpu_errors=errors if found or errors else None,
        took_s=time.perf_counter() - start,
    )
