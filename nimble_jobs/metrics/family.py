"""A metric family: its name, its meaning, and how its samples are read off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from nimble_jobs.metrics.sight import Sight

Value = float | tuple[int, float]  # a summary has a count and a sum
Samples = Iterable[tuple[tuple[str, ...], Value]]  # each with the values of the family's labels


class Kind(StrEnum):
    """The kind of a family, in Prometheus' words."""

    GAUGE = "gauge"
    COUNTER = "counter"
    SUMMARY = "summary"
    INFO = "info"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A metric family."""

    name: str  # without the suffixes _total, _count, _sum and _info
    kind: Kind
    help: str  # one line
    labels: tuple[str, ...] = ()
    read: Callable[[Sight], Samples]
    optional: bool = False  # left out if it has no samples

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that a query may use."""
        suffixes = {Kind.COUNTER: ("_total",), Kind.SUMMARY: ("_count", "_sum"), Kind.INFO: ("_info",)}
        return tuple(self.name + suffix for suffix in suffixes.get(self.kind, ("",)))

    def metric(self, sight: Sight) -> Metric | None:
        """The family with its samples; None if it is left out."""
        samples = list(self.read(sight))
        if self.optional and not samples:
            return None
        match self.kind:
            case Kind.GAUGE | Kind.COUNTER:
                make = GaugeMetricFamily if self.kind is Kind.GAUGE else CounterMetricFamily
                plain = make(self.name, self.help, labels=self.labels)
                for labels, value in samples:
                    assert not isinstance(value, tuple)
                    plain.add_metric(labels, value)
                return plain
            case Kind.SUMMARY:
                summary = SummaryMetricFamily(self.name, self.help, labels=self.labels)
                for labels, value in samples:
                    assert isinstance(value, tuple)
                    summary.add_metric(labels, *value)
                return summary
            case Kind.INFO:
                info = InfoMetricFamily(self.name, self.help, labels=())
                for labels, _ in samples:
                    info.add_metric((), dict(zip(self.labels, labels, strict=True)))
                return info
