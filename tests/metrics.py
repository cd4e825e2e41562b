"""Reads expositions in tests, as Prometheus would."""

from __future__ import annotations

from prometheus_client import parser
from prometheus_client.openmetrics import parser as open_parser

from nimble_jobs import metrics
from nimble_jobs.metrics import Gpus
from nimble_jobs.store import Store

Sample = tuple[str, tuple[tuple[str, str], ...]]  # name, and labels in order


class NoDriver:
    """The driver's interface on a machine without a driver."""

    def nvmlInit(self) -> None:  # noqa: N802  # the interface's name
        from pynvml import NVML_ERROR_LIBRARY_NOT_FOUND, NVMLError

        raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)


def scraped(store: Store, now: float, gpus: Gpus | None = None) -> dict[Sample, float]:
    """The samples of a store, from both formats, which must agree."""
    reader = gpus or Gpus(NoDriver())
    plain, kind = metrics.exposition(store, "text/plain", gpus=reader, now=now)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    opened, kind = metrics.exposition(store, accept, gpus=reader, now=now)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    samples = parsed(plain.decode())
    others = {
        key_of(sample.name, sample.labels): sample.value
        for family in open_parser.text_string_to_metric_families(opened.decode())
        for sample in family.samples
    }
    assert _still(samples) == _still(others)
    return samples


def _still(samples: dict[Sample, float]) -> dict[Sample, float]:
    """The samples, with 0 for those that change from one exposition to the next."""
    changing = ("nimble_jobs_scrape_duration_seconds", "nimble_jobs_worker_stall_seconds")
    return {key: 0.0 if key[0] in changing else value for key, value in samples.items()}


def parsed(text: str) -> dict[Sample, float]:
    """The samples of Prometheus' text format. Each may come once."""
    samples: dict[Sample, float] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = key_of(sample.name, sample.labels)
            assert key not in samples
            samples[key] = sample.value
    return samples


def key_of(name: str, labels: dict[str, str]) -> Sample:
    return name, tuple(sorted(labels.items()))


def value(samples: dict[Sample, float], name: str, /, **labels: str) -> float:
    """One sample, by its name without the leading nimble_jobs_."""
    return samples[key_of(f"nimble_jobs_{name}", labels)]


def counters(samples: dict[Sample, float]) -> dict[Sample, float]:
    """The samples that must never go down."""
    return {key: v for key, v in samples.items() if key[0].endswith(("_total", "_sum", "_count"))}
