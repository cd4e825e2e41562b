"""The learning rate at each step.

Sources: cosine after Loshchilov and Hutter (SGDR, 2017) without restarts; one_cycle after Smith and Topin
(Super-Convergence, 2018), with the shape and constants of torch's OneCycleLR.
"""

from __future__ import annotations

import math

from nimble_jobs.errors import JobFailed
from nimble_jobs.spec import LrScheduleSpec

_RISE = 0.3  # share of the steps
_FIRST, _LAST = 1 / 25, 1 / 25 / 1e4  # shares of the largest rate


class LearningRate:
    """The rates of a training of `steps` steps. Raises JobFailed if the training ends before its warm-up."""

    def __init__(self, schedule: LrScheduleSpec, base: float, steps: int) -> None:
        if schedule.warmup_steps >= steps and schedule.warmup_steps:
            raise JobFailed(
                f"train.lr_schedule.warmup_steps: found {schedule.warmup_steps}, but the training has {steps} steps; "
                f"expected fewer"
            )
        self.steps = steps
        self._schedule, self._base = schedule, base

    def __call__(self, step: int) -> float:
        """The rate of the step that follows `step` others."""
        return self._base * factor(self._schedule, step, self.steps)


def factor(schedule: LrScheduleSpec, step: int, steps: int) -> float:
    """The share of the base rate at `step` of `steps`: a linear warm-up, then the schedule's shape."""
    if schedule.name == "one_cycle":
        return _one_cycle(step, steps)
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    match schedule.name:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - progress
        case _:
            return 1.0


def _one_cycle(step: int, steps: int) -> float:
    """Rise from 1/25 of the base rate to all of it, then fall to nearly nothing, each along half a cosine."""
    top = _RISE * steps - 1
    if top > 0 and step <= top:
        return _between(_FIRST, 1.0, step / top)
    return _between(1.0, _LAST, min(1.0, (step - top) / max(1e-9, steps - 1 - top)))


def _between(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
