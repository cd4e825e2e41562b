"""From rows to ratios: ours against eager, against the best of torch.compile, against our own single stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nimble_jobs.bench.request import OURS, OURS_ONE
from nimble_jobs.bench.results import Row


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One model with one dtype and batch size. Of each system the faster memory format counts."""

    mode: str
    model: str
    dtype: str
    batch: int
    best: dict[str, Row]  # fastest row by system
    best_compile: Row | None  # fastest of all modes of torch.compile, CUDA graph around or not
    errors: tuple[Row, ...]

    @property
    def ours(self) -> Row | None:
        return self.best.get(OURS)

    def us(self, system: str) -> float | None:
        """The replay time of a system in microseconds."""
        row = self.best.get(system)
        return row.replay_us if row else None

    @property
    def over_eager(self) -> float | None:
        return _ratio(self.best.get("eager"), self.ours)

    @property
    def over_compile(self) -> float | None:
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
    def memory_over_compile(self) -> float | None:
        """Our peak memory in units of that of the best torch.compile."""
        return _ratio(self.ours, self.best_compile, "peak_bytes")


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
    compiled = [row for row in measured if row.system.startswith("compile-")]
    return Comparison(
        mode=mode,
        model=model,
        dtype=dtype,
        batch=batch,
        best=best,
        best_compile=compiled[0] if compiled else None,
        errors=tuple(row for row in rows if row.error is not None),
    )


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; None where there are none."""
    present = [value for value in values if value]
    return math.exp(sum(map(math.log, present)) / len(present)) if present else None


def geometric_means(comparisons: Sequence[Comparison]) -> dict[str, tuple[float | None, int]]:
    """Geometric mean over the models of each ratio, and over how many models."""
    ratios = {
        "over_eager": [c.over_eager for c in comparisons],
        "over_compile": [c.over_compile for c in comparisons],
        "over_one_stream": [c.over_one_stream for c in comparisons],
    }
    return {name: (geometric_mean(values), sum(v is not None for v in values)) for name, values in ratios.items()}


def _ratio(numerator: Row | None, denominator: Row | None, name: str = "replay_us") -> float | None:
    above = getattr(numerator, name, None)
    below = getattr(denominator, name, None)
    return above / below if above and below else None
