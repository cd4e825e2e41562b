"""Finds out whether a replay is faster than the unchanged model.

Both are timed in turns. If they differ by no more than noise, the replay is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from nimble_jobs.engine import measure
from nimble_jobs.errors import UsageError
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.schedule import Schedule

VARIABLE = "NIMBLE_JOBS_EAGER"
_LEAST_NOISE, _MOST_NOISE = 0.02, 0.10  # shares of a time
_ROUNDS = 3  # at least
CLEARLY = 0.8  # a replay that takes less than this share of eager's time is not timed again


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Times of one call in eager and of one replay, microseconds, and how far they can be trusted."""

    eager_us: float
    replay_us: float
    noise: float  # share of the times, below which a difference means nothing

    @property
    def eager_wins(self) -> bool:
        """Whether the replay is slower by more than the noise."""
        return self.replay_us > self.eager_us * (1 + self.noise)

    def over(self, name: str) -> str:
        """Why eager runs, in words."""
        return f"runs because {name} is slower, by more than the measurement noise of {self.noise:.0%}"

    @classmethod
    def of(cls, eager_us: Sequence[float], replay_us: Sequence[float]) -> Contest:
        """Medians. The noise is half the distance of the quartiles, of both together, between 2 and 10 percent."""
        noise = min(max(_spread(eager_us) + _spread(replay_us), _LEAST_NOISE), _MOST_NOISE)
        return cls(eager_us=median(eager_us), replay_us=median(replay_us), noise=noise)


def eager_counts(options: BuildOptions) -> bool:
    """Whether eager may win: unless the options or VARIABLE say that it is the reference alone. Raises UsageError."""
    said = os.environ.get(VARIABLE) or "candidate"
    if said not in ("candidate", "reference"):
        raise UsageError(f"{VARIABLE}: found {said!r}; expected 'candidate' or 'reference'")
    return said == "candidate" and options.eager == "candidate"


def worth_a_contest(replay_us: float, eager_us: float, options: BuildOptions) -> bool:
    """Whether eager may win, and is not slower beyond doubt. Raises UsageError."""
    return eager_counts(options) and replay_us >= CLEARLY * eager_us


def faster_in_eager(schedule: Schedule | None) -> str:
    """The end of a sentence about a schedule that is not used because eager is faster; empty for others."""
    if schedule is None or schedule.runs != "eager":
        return ""
    eager, replay = f"{schedule.eager_us / 1e3:.4g} ms", f"{schedule.replay_us / 1e3:.4g} ms"
    return f"; eager is faster here: {eager} a batch, a replay takes {replay}"


def against_eager(
    eager: Callable[[], object],
    replay: Callable[[], object],
    device: torch.device,
    *,
    eager_us: float,
    as_given: bool,
    **turns: Any,
) -> Contest:
    """Time both, in turns, with further arguments of `in_turns_us`. If the replay does not want the weights laid out
    `as_given`, eager's time is `eager_us`, measured while they still were.
    """
    if not as_given:
        (times,) = measure.in_turns_us([replay], device, **turns)
        return Contest.of([eager_us], times)
    return Contest.of(*measure.in_turns_us([eager, replay], device, at_least=_ROUNDS, **turns))


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / middle
