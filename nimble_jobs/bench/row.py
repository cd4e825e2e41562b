"""One row of results: what was found out about one system on one model, or why there is no figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nimble_jobs.bench.request import Unit

Key = tuple[str, str, str, str, int, str, int | None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found out about one system on one model. What was not measured is None."""

    model: str
    system: str
    batch: int
    dtype: str
    mode: str = "inference"
    layout: str  # contiguous | channels-last | own choice
    in_flight: int | None = None  # instances replayed at once; None for rows of latency
    replay_us: float | None = None  # median of one call or replay, input and output on the device
    replay_low_us: float | None = None  # first quartile
    replay_high_us: float | None = None  # third quartile
    with_copies_us: float | None = None  # median, from pinned host memory and back to it
    records_per_s: float | None = None
    records_per_s_with_copies: float | None = None
    prepare_s: float | None = None  # from the module on the device to a first finished call
    caches: str | None = None  # cold | shared: compilers' caches while preparing
    peak_bytes: int | None = None  # device memory beyond weights and inputs while running
    build_peak_bytes: int | None = None  # the same while preparing
    relative_norm: float | None = None  # largest difference from eager on fresh inputs; training: of losses, on average
    busy_us: float | None = None  # time of one call in which at least one kernel runs
    kernels: int | None = None  # launched by one call
    idle_share: float | None = None  # of the GPU: 1 - busy_us / replay_us
    facts: dict[str, Any] = field(default_factory=dict)  # ours: tasks, width, streams, syncs, bounds
    candidates: list[dict[str, Any]] = field(default_factory=list)  # ours: everything that was built and measured
    note: str | None = None
    error: str | None = None

    @property
    def key(self) -> Key:
        return (self.mode, self.model, self.system, self.dtype, self.batch, self.layout, self.in_flight)


def blank(unit: Unit, system: str) -> Row:
    """A row without figures."""
    return Row(model=unit.model, system=system, batch=unit.batch, dtype=unit.dtype, mode=unit.mode, layout=unit.layout)


def failed(unit: Unit, systems: Iterable[str], error: str) -> list[Row]:
    """A row for each system, saying why there is no figure."""
    return [dataclasses.replace(blank(unit, system), error=error) for system in systems]


def in_words(error: BaseException) -> str:
    """One line for an error row."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0][:300] if lines else ""
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return f"out of memory: {said}"
    own = type(error).__module__.startswith("nimble_jobs.")
    return said if own else f"{name}: {said}"
