"""A training step, ready to run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nimble_jobs.planner.eager_step import EagerStep, TrainingStep
from nimble_jobs.planner.step_request import OptimizerRecipe, StepRequest

__all__ = ["EagerStep", "OptimizerRecipe", "StepRequest", "TrainingStep", "prepare_step"]

Report = Callable[..., None]


def prepare_step(request: StepRequest, *, device: torch.device, report: Report = lambda **_: None) -> TrainingStep:
    """The step of `request.module`, which lies on `device`."""
    report(phase="build")
    return EagerStep(request, device, fallback="training steps have no schedules yet")
