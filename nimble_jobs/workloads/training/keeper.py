"""Takes checkpoints while the training goes on: a copy of the state now, files and syncs on a thread later.

A disk that is full, or read-only for a while, is waited for on that thread; the training goes on until the next
checkpoint is due.

Nothing waits for the device. A copy is written once the figures of all its steps have come from there, and are finite.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from nimble_jobs.errors import JobFailed
from nimble_jobs.patience import NONE, Patience
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.workloads.training import checkpoint, random_state
from nimble_jobs.workloads.training.checkpoint import MODEL, STATE, STEPS, Checkpoint
from nimble_jobs.workloads.training.checkpoints import Checkpoints
from nimble_jobs.workloads.training.figures import Steps
from nimble_jobs.workloads.training.flat import Flat
from nimble_jobs.workloads.training.live import Live, unsaved
from nimble_jobs.workloads.training.progress import Progress


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A copy of the state that is not being written yet."""

    step: int
    sheet: dict[str, Any]
    best: int | None  # step of the best epoch so far


class Keeper:
    """Writes checkpoints of one training, one at a time. Failures come up at the next call."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        module: nn.Module,
        step: TrainingStep,
        device: torch.device,
        *,
        keep_last: int,
        found: Checkpoint | None = None,
        patience: Patience = NONE,
    ) -> None:
        self._checkpoints = checkpoints
        self._live = Live(module)
        self._step = step
        self._device = device
        self._keep_last = keep_last
        self._patience = patience
        self._trained = [n for n, p in module.named_parameters() if p.requires_grad]
        self._flats = {name: Flat(found, device) for name, found in self._tensors().items()}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nimble-checkpoint")
        self._waiting: _Taken | None = None
        self._writing: Future[None] | None = None
        self.latest = found.step if found is not None else None  # step of the newest one that is on the disk
        self._taken: tuple[int, int] | None = None
        self.written = 0
        self.stalled_s = 0.0  # how long the training waited

    @property
    def path(self) -> Path | None:
        """Where the newest one is that is on the disk."""
        return None if self.latest is None else self._checkpoints.path(self.latest)

    @property
    def busy(self) -> bool:
        """Is one being written, or waiting for figures? Raises what went wrong with the last one."""
        if self._writing is None:
            return self._waiting is not None
        if not self._writing.done():
            return True
        writing, self._writing = self._writing, None
        writing.result()
        return False

    def take(self, sheet: Mapping[str, Any], progress: Progress) -> None:
        """Copy the state of this moment, after the one before was written; nothing where it is kept already.

        It is written by the first `write` that is given the figures of all its steps.
        """
        start = time.perf_counter()
        self.settle()
        if self._taken == (progress.step, progress.epoch):
            return
        assert self._waiting is None
        self._taken = (progress.step, progress.epoch)
        for name, found in self._tensors().items():
            self._flats[name].take(found)
        best = progress.best["step"] if progress.best else None
        full = {**sheet, "progress": progress.to_json(), "random": random_state.capture(self._device)}
        self._waiting = _Taken(step=progress.step, sheet=full, best=best)
        self.stalled_s += time.perf_counter() - start

    def write(self, steps: Steps) -> None:
        """Begin to write what was taken, if these are the figures of all its steps; none of them may be infinite."""
        taken = self._waiting
        if taken is None or len(steps) < taken.step:
            return
        self._waiting = None
        figures = steps.tensors(taken.step)
        self._writing = self._thread.submit(self._write, taken.step, taken.sheet, figures, taken.best)

    def settle(self) -> None:
        """Wait until the last one that is being written is on the disk. Raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {MODEL: self._live.weights(), STATE: self._state()}

    def _state(self) -> dict[str, torch.Tensor]:
        buffers = {f"buffer.{n}": t for n, t in self._live.unsaved().items()}
        return {**buffers, **{f"step.{n}": t for n, t in self._step.state_dict().items()}}

    def _write(self, step: int, sheet: dict[str, Any], figures: dict[str, torch.Tensor], best: int | None) -> None:
        values = {name: flat.values() for name, flat in self._flats.items()}
        broken = self._flats[MODEL].not_finite(self._trained)
        if broken is not None:
            raise JobFailed(f"the weights {broken} are not finite after step {step}; no checkpoint of them is kept")
        files = {name: (self._flats[name].head, data) for name, data in values.items()}
        path = self._checkpoints.path(step)
        pieces = {**files, STEPS: (save(figures),)}
        self._patience.through(lambda: checkpoint.write(path, sheet, pieces, owner=self._checkpoints.owner))
        self.latest = step
        self.written += 1
        self._patience.through(lambda: self._checkpoints.prune(step, self._keep_last, best))


def restore(found: Checkpoint, module: nn.Module, step: TrainingStep, device: torch.device) -> tuple[Progress, Steps]:
    """Put module, step and random generators into the state of a checkpoint, in place. Raises Damaged."""
    state = found.tensors(STATE)
    module.load_state_dict(found.tensors(MODEL))
    with torch.no_grad():
        for name, buffer in unsaved(module).items():
            buffer.copy_(state[f"buffer.{name}"])
    step.load_state_dict(_below("step.", state))
    random_state.restore(found.sheet["random"], device)
    return Progress.from_json(found.sheet["progress"]), Steps(found.tensors(STEPS))


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
