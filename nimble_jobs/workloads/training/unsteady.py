"""Operators whose results may differ from run to run: with one of them a resume cannot be exact."""

from __future__ import annotations

import re
import warnings

import torch

from nimble_jobs.engine.step import differentiate
from nimble_jobs.planner.keys.switches import VARIES, as_in_training
from nimble_jobs.planner.module.restoring import no_traces
from nimble_jobs.planner.step.eager import Objective
from nimble_jobs.planner.step.request import StepRequest


def unsteady(request: StepRequest, device: torch.device) -> tuple[str, ...]:
    """Names of such operators in the step, forward and backward, as torch knows of its own on this device.

    Runs it once in eager; no trace is left.
    """
    with (
        as_in_training(device),
        no_traces(request.module, device),
        torch.enable_grad(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        loss, _ = Objective(request, device)(request.x, request.y)
        differentiate({"loss": loss}, request.parameters, {"loss": torch.ones_like(loss)}, accumulate=True)
    found = [re.match(VARIES, str(warning.message)) for warning in caught]
    return tuple(sorted({match[1] for match in found if match is not None}))
