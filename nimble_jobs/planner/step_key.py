"""What the schedule of a recorded training step depends on, and the batches that it is checked with."""

from __future__ import annotations

from dataclasses import asdict, replace
from hashlib import sha256

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.planner.request import schedule_key
from nimble_jobs.planner.step_request import StepRequest
from nimble_jobs.schedule import FORMAT_VERSION, Program


def key_parts_of_step(
    program: Program, request: StepRequest, tolerance: float, device: torch.device, *, update: bool
) -> dict[str, str]:
    """Everything that the schedule of a recorded step depends on: what was recorded names the model exactly."""
    bare = replace(program, tasks=tuple(replace(t, source=None) for t in program.tasks))
    options = request.options
    return {
        **devices.facts(device),
        "mode": "training",
        "format": str(FORMAT_VERSION),
        "program": sha256(repr(bare).encode()).hexdigest(),
        "update": str(update),
        "loss": request.loss_name,
        "optimizer": repr(asdict(request.optimizer)),
        "clip_norm": repr(request.clip_norm),
        "precision": request.precision,
        "accumulate": str(request.accumulate),
        "tolerance": repr(tolerance),
        "input": ", ".join(f"{n}:{t.dtype}{list(t.shape)}" for n, t in (("x", request.x), ("y", request.y))),
        "schedule.streams": str(options.streams),
        "schedule.fuse": options.fuse,
        "schedule.layout": options.layout,
    }


def check_seed(program: Program, request: StepRequest, tolerance: float, device: torch.device) -> int:
    """The seed of a step's last check, from the schedule's key: what passed it once passes it when a training goes on.

    `program` is the one that updates the weights.
    """
    return int(schedule_key(key_parts_of_step(program, request, tolerance, device, update=True))[:7], 16)
