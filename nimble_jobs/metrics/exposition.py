"""The metrics as text, in Prometheus' format or in OpenMetrics'."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from nimble_jobs.metrics.families import FAMILIES
from nimble_jobs.metrics.gpus import Gpus
from nimble_jobs.metrics.sight import Sight, look
from nimble_jobs.store import Store

OPEN_METRICS = "application/openmetrics-text"


class _Collected(Collector):
    """The families of one reading."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def collect(self) -> Iterable[Metric]:
        return [metric for family in FAMILIES if (metric := family.metric(self._sight)) is not None]


def exposition(
    store: Store, accept: str = "", *, gpus: Gpus | None = None, now: float | None = None
) -> tuple[bytes, str]:
    """The metrics of a store, and their content type: OpenMetrics if `accept`, a request's header, names it.

    `gpus` should be kept by whoever asks more than once, since opening the driver takes time. Raises StoreError if the
    store cannot be read.
    """
    reader = gpus or Gpus()
    try:
        sight = look(store, reader, time.time() if now is None else now)
    finally:
        if gpus is None:
            reader.close()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(sight))
    if OPEN_METRICS in accept.lower():
        return openmetrics.generate_latest(registry), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
