"""Takes checkpoints while the training goes on: a copy of the state now, files and syncs on a thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from nimble_jobs.errors import JobFailed, ModelError
from nimble_jobs.planner.training import TrainingStep
from nimble_jobs.workloads.training import checkpoint, random_state
from nimble_jobs.workloads.training.checkpoint import MODEL, STATE, STEPS, Checkpoint
from nimble_jobs.workloads.training.checkpoints import Checkpoints
from nimble_jobs.workloads.training.figures import Steps
from nimble_jobs.workloads.training.flat import Flat
from nimble_jobs.workloads.training.progress import Progress


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
    ) -> None:
        self._checkpoints = checkpoints
        self._module = module
        self._step = step
        self._device = device
        self._keep_last = keep_last
        self._trained = [n for n, p in module.named_parameters() if p.requires_grad]
        self._flats: dict[str, Flat] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nimble-checkpoint")
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
        """Is one being written? Raises what went wrong with the last one."""
        if self._writing is None:
            return False
        if not self._writing.done():
            return True
        writing, self._writing = self._writing, None
        writing.result()
        return False

    def take(self, sheet: Mapping[str, Any], progress: Progress, steps: Steps) -> None:
        """Have a checkpoint of this moment written, after the one before; nothing where it is written already."""
        start = time.perf_counter()
        self.settle()
        if self._taken == (progress.step, progress.epoch):
            return
        self._taken = (progress.step, progress.epoch)
        tensors = {MODEL: _weights(self._module), STATE: self._state()}
        for name, found in tensors.items():
            if name not in self._flats:
                self._flats[name] = Flat(found, self._device)
            self._flats[name].take(found)
        best = progress.best["step"] if progress.best else None
        full = {**sheet, "progress": progress.to_json()}
        full["random"] = random_state.capture(self._device)
        figures = steps.tensors()
        self._writing = self._thread.submit(self._write, progress.step, full, figures, best)
        self.stalled_s += time.perf_counter() - start

    def settle(self) -> None:
        """Wait until the last one is on the disk. Raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _state(self) -> dict[str, torch.Tensor]:
        buffers = {f"buffer.{n}": t for n, t in _unsaved(self._module).items()}
        return {**buffers, **{f"step.{n}": t for n, t in self._step.state_dict().items()}}

    def _write(self, step: int, sheet: dict[str, Any], figures: dict[str, torch.Tensor], best: int | None) -> None:
        values = {name: flat.values() for name, flat in self._flats.items()}
        broken = self._flats[MODEL].not_finite(self._trained)
        if broken is not None:
            raise JobFailed(f"the weights {broken} are not finite after step {step}; no checkpoint of them is kept")
        files = {name: (self._flats[name].head, data) for name, data in values.items()}
        path = self._checkpoints.path(step)
        checkpoint.write(path, sheet, {**files, STEPS: (save(figures),)}, owner=self._checkpoints.owner)
        self.latest = step
        self.written += 1
        self._checkpoints.prune(step, self._keep_last, best)


def restore(found: Checkpoint, module: nn.Module, step: TrainingStep, device: torch.device) -> tuple[Progress, Steps]:
    """Put module, step and random generators into the state of a checkpoint, in place. Raises Damaged."""
    state = found.tensors(STATE)
    module.load_state_dict(found.tensors(MODEL))
    with torch.no_grad():
        for name, buffer in _unsaved(module).items():
            buffer.copy_(state[f"buffer.{name}"])
    step.load_state_dict(_below("step.", state))
    random_state.restore(found.sheet["random"], device)
    return Progress.from_json(found.sheet["progress"]), Steps(found.tensors(STEPS))


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"train.checkpoint: {name} of the model's state is a {type(value).__name__}, no tensor")
    return dict(state)


def _unsaved(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are no part of the module's state dict."""
    state = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
