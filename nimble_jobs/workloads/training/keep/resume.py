"""Which checkpoint a training goes on from, and whether it will be the same training bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.errors import Damaged, JobFailed
from nimble_jobs.kernel_switches import NOTHING
from nimble_jobs.patience import Patience
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.step import kernels_digest
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.schedule import COMPILERS, Schedule
from nimble_jobs.workloads.basis import differences
from nimble_jobs.workloads.context import Event
from nimble_jobs.workloads.training.keep.checkpoint import MODEL, Checkpoint, Checkpoints, read, read_sheet

_LINES = 5  # of differences between two trainings, at most


@dataclass(frozen=True, kw_only=True)
class Search:
    """Looks for the checkpoint to go on from, in the folder of a training."""

    resume: str  # `train.resume`: auto, never, or the path of a checkpoint
    checkpoints: Checkpoints
    basis: str  # digest of `parts`
    parts: dict[str, Any]  # what decides the training
    patience: Patience
    event: Event

    def run(self) -> Checkpoint | None:
        """The checkpoint to go on from; None for a new training. Events name those that are damaged or foreign.

        Raises JobFailed if `train.resume` is a path without a sound checkpoint of this training.
        """
        if self.resume == "never":
            self.patience.through(self.checkpoints.clear)
            return None
        self.patience.through(self.checkpoints.tidy)
        newest = self.patience.through(self.checkpoints.newest)
        used, instead = newest.checkpoint, "it is not used"
        try:
            if self.resume != "auto":
                named = self._named(Path(self.resume))
                if used is not None and used.step > named.step:
                    text = (
                        f"train.resume: {named.path} is passed over, because {used.path} of the same training is later"
                    )
                    self.event("passed-over", text, {"named": str(named.path), "used": str(used.path)})
                else:
                    used = named
            if used is None:
                instead = "the training starts over, because there is no other checkpoint"
            else:
                instead = f"the checkpoint after step {used.step} is used"
        finally:
            for reason in newest.damaged:
                self.event("checkpoint-damaged", f"{reason}; {instead}", {})
        if used is None:
            for path in self.checkpoints.others():
                self._tell_other(path)
        return used

    def _named(self, path: Path) -> Checkpoint:
        """The checkpoint in a folder, with the best one that it relies on in this training's folder."""
        try:
            named = read(path)
            best = None
            if named.best_step is not None:
                best = read(path.parent / self.checkpoints.path(named.best_step).name)
        except Damaged as e:
            raise JobFailed(f"train.resume: {e}; expected a sound checkpoint, or auto") from e
        if named.sheet["basis"] != self.basis:
            raise JobFailed(
                f"train.resume: {path} belongs to another training: {self._differences(named.sheet)}; expected the "
                f"same training, or train.init_from: {path / MODEL} to start a new one from its weights"
            )
        if best is not None:
            self.checkpoints.adopt(best)
        return named

    def _tell_other(self, path: Path) -> None:
        try:
            lines = self._differences(read_sheet(path))
        except (Damaged, KeyError):
            return  # a damaged one does not say what it is of
        text = f"starts over: {path} belongs to another training: {lines}"
        self.event("other-training", text, {"checkpoint": str(path)})

    def _differences(self, sheet: dict[str, Any]) -> str:
        return "; ".join(differences(sheet["parts"], self.parts)[:_LINES])


def environment(steps: Sequence[TrainingStep], validations: Sequence[Schedule], device: torch.device) -> dict[str, str]:
    """What equal bits depend on, besides the training itself: the steps for batches of each shape, and the schedules
    that validations replay.
    """
    kernels = kernels_digest(validations) if validations else "eager"
    found = {**devices.facts(device), "validation.digest": kernels}
    for number, step in enumerate(steps):
        found |= {name + _suffix(number): value for name, value in _of_step(step).items()}
    return found


def _of_step(step: TrainingStep) -> dict[str, str]:
    schedule = step.schedule
    if schedule is None or schedule.runs == "eager":
        return {"schedule": "eager"}
    return {
        "schedule": schedule.key,
        "schedule.digest": kernels_digest(step.schedules.values()),
        "kernels": schedule.kernels,
        "layout": schedule.layout,
    }


def _suffix(number: int) -> str:
    """What the names of the second shape's values, and those of further ones, end with."""
    return f"[{number}]" if number else ""


def began_with(kept: Checkpoint | None, options: BuildOptions) -> list[Source | Literal["eager"] | None]:
    """The kinds of steps that the training began with, by shape, as far as the options allow them.

    None leaves the choice open, and so does the end of the list.
    """
    found: list[Source | Literal["eager"] | None] = []
    before = {} if kept is None else kept.sheet["environment"]
    while (name := "schedule" + _suffix(len(found))) in before:
        suffix = name.removeprefix("schedule")
        if before[name] == "eager":
            found.append("eager")
        elif before["kernels" + suffix] != "eager" and options.fuse == "off":
            found.append(None)
        else:
            kernels = before["kernels" + suffix]
            without = options.without if kernels in COMPILERS else NOTHING
            found.append(Source(kernels=kernels, layout=before["layout" + suffix], without=without))
    return found


def inexact(varying: Sequence[str], remembered: Sequence[str]) -> list[str]:
    """Why no resume of a training is exact: operators that vary, and what model and loss remember in Python."""
    lines = []
    if varying:
        lines.append(f"{', '.join(varying)} can give different bits in each run")
    if remembered:
        lines.append(f"each step changes {', '.join(remembered)} in Python, which no checkpoint holds")
    return lines


def tell(event: Event, kept: Checkpoint, now: dict[str, str], *, steps: int, inexact: Sequence[str] = ()) -> None:
    """Record on the job where the training goes on, and why its bits may differ: another environment, or what is
    `inexact`.
    """
    by = kept.sheet["job"]
    text = f"continues after step {kept.step} of {steps}, from {kept.path} by attempt {by['attempt']} of {by['id']}"
    lines = [*differences(kept.sheet["environment"], now), *inexact]
    if lines:
        text += f"; not bit for bit like an uninterrupted training: {'; '.join(lines)}"
    event("resumed", text, {"step": kept.step, "exact": not lines, "checkpoint": str(kept.path)})
