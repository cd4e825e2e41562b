"""From rows to ratios: ours against eager, against the best of torch.compile, against our own single stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nimble_jobs.bench.request import (
    CHANNELS_LAST,
    COMPILE,
    CONTIGUOUS,
    FAMILIES,
    OURS,
    OURS_ONE,
    TRAINING_FAMILIES,
    layouts_for,
)
from nimble_jobs.bench.row import Row

Variant = tuple[str, str]  # a system and a memory format


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One model with one dtype and batch size. Of each system the faster memory format counts."""

    mode: str
    model: str
    dtype: str
    batch: int
    best: dict[str, Row]  # fastest row by system
    compiled: tuple[Row, ...]  # torch.compile as measured: each mode and memory format, CUDA graph around or not
    errors: tuple[Row, ...]

    @property
    def ours(self) -> Row | None:
        return self.best.get(OURS)

    @property
    def best_compile(self) -> Row | None:
        """The fastest of all that was measured of torch.compile."""
        return self.compiled[0] if self.compiled else None

    @property
    def variants(self) -> list[Variant]:
        """All that can be measured of torch.compile: images in both memory formats, tokens in one."""
        families = TRAINING_FAMILIES if self.mode == "training" else FAMILIES
        return [
            (system, layout)
            for family, systems in families.items()
            for system in systems
            if system.startswith(COMPILE)
            for layout in layouts_for(self.model, family, (CONTIGUOUS, CHANNELS_LAST))
        ]

    @property
    def not_measured(self) -> list[Variant]:
        """Modes and memory formats of torch.compile that have no figure for this model."""
        present = {(row.system, row.layout) for row in self.compiled}
        return [variant for variant in self.variants if variant not in present]

    def us(self, system: str) -> float | None:
        """The replay time of a system in microseconds."""
        row = self.best.get(system)
        return row.replay_us if row else None

    @property
    def over_eager(self) -> float | None:
        return _ratio(self.best.get("eager"), self.ours)

    @property
    def over_best_compile(self) -> float | None:
        return _ratio(self.best_compile, self.ours)

    @property
    def chosen_us(self) -> float | None:
        """The replay time of the chosen schedule in microseconds, as the planner measured it."""
        return self.ours.facts.get("built_replay_us", self.ours.replay_us) if self.ours else None

    @property
    def over_one_stream(self) -> float | None:
        """Our best single stream against the chosen schedule, both as the planner measured them."""
        one, chosen = self.us(OURS_ONE), self.chosen_us
        return one / chosen if one and chosen else None

    @property
    def memory_over_best_compile(self) -> float | None:
        """Our peak memory in units of that of the best torch.compile."""
        return _ratio(self.ours, self.best_compile, "peak_bytes")

    def to_json(self) -> dict[str, Any]:
        """The ratios, and what torch.compile was measured in, the fastest first."""
        return {
            "mode": self.mode,
            "model": self.model,
            "dtype": self.dtype,
            "batch": self.batch,
            "eager_us": self.us("eager"),
            "ours_us": self.us(OURS),
            "best_compile_us": self.best_compile.replay_us if self.best_compile else None,
            "compile_measured": [
                {"system": row.system, "layout": row.layout, "replay_us": row.replay_us} for row in self.compiled
            ],
            "compile_not_measured": [{"system": system, "layout": layout} for system, layout in self.not_measured],
            "over_eager": self.over_eager,
            "over_best_compile": self.over_best_compile,
            "over_one_stream": self.over_one_stream,
            "memory_over_best_compile": self.memory_over_best_compile,
        }


def compare(rows: Iterable[Row]) -> list[Comparison]:
    """One comparison for each mode, model, dtype and batch size, in order of appearance."""
    groups: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        if row.in_flight is None:
            groups.setdefault((row.mode, row.model, row.dtype, row.batch), []).append(row)
    return [_comparison(*key, members) for key, members in groups.items()]


def _comparison(mode: str, model: str, dtype: str, batch: int, rows: Sequence[Row]) -> Comparison:
    measured = sorted((row for row in rows if row.error is None and row.replay_us), key=lambda row: row.replay_us or 0)
    best: dict[str, Row] = {}
    for row in measured:
        best.setdefault(row.system, row)
    return Comparison(
        mode=mode,
        model=model,
        dtype=dtype,
        batch=batch,
        best=best,
        compiled=tuple(row for row in measured if row.system.startswith(COMPILE)),
        errors=tuple(row for row in rows if row.error is not None),
    )


def best_of(comparisons: Sequence[Comparison]) -> list[str]:
    """What the best torch.compile is the best of, in words: one line, or more where models differ in that."""
    groups: dict[str, list[str]] = {}
    for comparison in comparisons:
        if comparison.compiled:
            groups.setdefault(_competitors(comparison), []).append(comparison.model)
    measured = sum(map(len, groups.values()))
    head = "best compile" + (f", for {measured} of {len(comparisons)} models" if measured < len(comparisons) else "")
    if len(groups) == 1:
        return [f"{head}: the fastest of {words}" for words in groups]
    lines = [f"  {', '.join(models)}: {words}" for words, models in groups.items()]
    return [f"{head}: the fastest of", *lines] if lines else []


def _competitors(comparison: Comparison) -> str:
    """The variants in words, such as: default, default+graph in each layout; max-autotune in contiguous alone."""
    layouts: dict[str, list[str]] = {}
    for system, layout in (v for v in comparison.variants if v not in comparison.not_measured):
        layouts.setdefault(system, []).append(layout)
    missing = {system for system, _ in comparison.not_measured}
    modes: dict[str, list[str]] = {}
    for system, given in layouts.items():
        where = f"{given[0]} alone" if system in missing else "each layout"
        modes.setdefault(where, []).append(system.removeprefix(COMPILE))
    return "; ".join(f"{', '.join(names)} in {where}" for where, names in modes.items())


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are not None; None if all are."""
    present = [value for value in values if value]
    return math.exp(sum(map(math.log, present)) / len(present)) if present else None


def geometric_means(comparisons: Sequence[Comparison]) -> dict[str, tuple[float | None, int]]:
    """Geometric mean over the models of each ratio, and over how many models."""
    ratios = {
        "over_eager": [c.over_eager for c in comparisons],
        "over_best_compile": [c.over_best_compile for c in comparisons],
        "over_one_stream": [c.over_one_stream for c in comparisons],
    }
    return {name: (geometric_mean(values), sum(v is not None for v in values)) for name, values in ratios.items()}


def _ratio(numerator: Row | None, denominator: Row | None, name: str = "replay_us") -> float | None:
    above = getattr(numerator, name, None)
    below = getattr(denominator, name, None)
    return above / below if above and below else None
