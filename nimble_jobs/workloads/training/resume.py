"""Which checkpoint a training goes on from, and whether it will be the same training bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.errors import Damaged, JobFailed
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.step import kernels_digest
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.schedule import Schedule
from nimble_jobs.spec import TrainSpec
from nimble_jobs.workloads.basis import differences
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.training import checkpoint
from nimble_jobs.workloads.training.checkpoint import MODEL, Checkpoint
from nimble_jobs.workloads.training.checkpoints import Checkpoints


def find(context: JobContext, checkpoints: Checkpoints, sheet: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint to go on from, as `train.resume` says; damaged and foreign ones become events of the job.

    `sheet` is what checkpoints of this training say. Raises JobFailed for a path that holds no sound checkpoint, or
    that of another training.
    """
    train = context.spec.train
    assert train is not None
    if train.resume == "never":
        context.patience.through(checkpoints.clear)
        return None
    context.patience.through(checkpoints.tidy)
    found = context.patience.through(checkpoints.newest)
    used, instead = found.checkpoint, "it is not used"
    try:
        if train.resume != "auto":
            named = _named(train, checkpoints, sheet)
            used = named if used is None or used.step < named.step else used
        instead = "starts anew, as there is no other" if used is None else f"the one after step {used.step} is used"
    finally:
        for reason in found.damaged:
            context.event("checkpoint-damaged", f"{reason}; {instead}", {})
    if used is None:
        for path in checkpoints.others():
            _tell_other(context, path, sheet)
    return used


def environment(step: TrainingStep, validation: Schedule | None, device: torch.device) -> dict[str, str]:
    """What equal bits depend on beside the training itself; `validation` is what validations replay, if they do."""
    kernels = "eager" if validation is None else kernels_digest([validation])
    parts = {**devices.facts(device), "validation.digest": kernels}
    if step.schedule is None or step.schedule.runs == "eager":
        return {**parts, "schedule": "eager"}
    found = step.schedule
    return {
        **parts,
        "schedule": found.key,
        "schedule.digest": kernels_digest(step.schedules.values()),
        "kernels": found.kernels,
        "layout": found.layout,
    }


def source_of(found: Checkpoint | None, options: BuildOptions) -> Source | Literal["eager"] | None:
    """What the training began with, as far as the options allow it; None where the choice is free."""
    if found is None:
        return None
    there = found.sheet["environment"]
    if there["schedule"] == "eager":
        return "eager"
    if there["kernels"] != "eager" and options.fuse == "off":
        return None
    return Source(kernels=there["kernels"], layout=there["layout"])


def tell(
    context: JobContext, found: Checkpoint, here: dict[str, str], *, steps: int, varying: Sequence[str] = ()
) -> None:
    """Record where the training goes on, and what stands against equal bits; `varying` are operators that do."""
    by = found.sheet["job"]
    text = f"goes on after step {found.step} of {steps}, from {found.path} by attempt {by['attempt']} of {by['id']}"
    lines = differences(found.sheet["environment"], here)
    if varying:
        lines.append(f"{', '.join(varying)} may give other bits each time")
    if lines:
        text += f"; not bit for bit as if undisturbed: {'; '.join(lines)}"
    context.event("resumed", text, {"step": found.step, "exact": not lines, "checkpoint": str(found.path)})


def _named(train: TrainSpec, checkpoints: Checkpoints, sheet: dict[str, Any]) -> Checkpoint:
    path = Path(train.resume)
    try:
        named = checkpoint.read(path)
        best = named.sheet["progress"]["best"]
        other = checkpoint.read(path.parent / checkpoints.path(best["step"]).name) if best else None
    except Damaged as e:
        raise JobFailed(f"train.resume: {e}; expected a sound checkpoint, or auto") from e
    if named.sheet["basis"] != sheet["basis"]:
        lines = "; ".join(differences(named.sheet["parts"], sheet["parts"])[:5])
        raise JobFailed(
            f"train.resume: {path} is of another training: {lines}; expected the same training, or "
            f"train.init_from: {path / MODEL} to start a new one from its weights"
        )
    if other is not None and not checkpoints.path(other.step).exists():
        checkpoint.adopt(other, checkpoints.path(other.step), owner=checkpoints.owner)
    return named


def _tell_other(context: JobContext, path: Path, sheet: dict[str, Any]) -> None:
    try:
        there = checkpoint.read_sheet(path)
        lines = "; ".join(differences(there["parts"], sheet["parts"])[:5])
    except (Damaged, KeyError):
        return  # whose it is cannot be told
    text = f"starts anew: {path} is of another training: {lines}"
    context.event("other-training", text, {"checkpoint": str(path)})
