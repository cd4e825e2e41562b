"""The state of a running training, which checkpoints hold: progress, tensors, and random generators."""

from __future__ import annotations

import base64
import math
import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.data import BadRecord
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.errors import ModelError
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.spec import CheckpointSpec, EarlyStoppingSpec
from nimble_jobs.workloads.training.gauge.figures import Steps
from nimble_jobs.workloads.training.keep.checkpoint import MODEL, STATE, STEPS, Checkpoint
from nimble_jobs.workloads.training.keep.flat import lies

OTHER_RANKS = "ranks"  # in a checkpoint's random states: those of all ranks but the first


@dataclass(kw_only=True)
class Progress:
    """How far a training has come. Checkpoints hold these fields as they are."""

    step: int = 0  # steps of the optimizer that are done
    epoch: int = 1  # the one under way
    batch: int = 0  # batches of it that were taken
    bad: int = 0  # bad records among them
    bad_records: dict[str, list[str]] = field(default_factory=dict)  # of all epochs: position -> id, reason
    finished: bool = False
    epochs: list[dict[str, Any]] = field(default_factory=list)  # metrics of the epochs that are done
    best: dict[str, Any] | None = None  # step, epoch, metric and value of the best epoch
    goal: float | None = None  # best value that early stopping has seen
    waited: int = 0  # measurements since then

    def bad_in_order(self) -> list[BadRecord]:
        """The bad records of all epochs, by their position."""
        bad = [BadRecord(index=int(i), id=name, reason=why) for i, (name, why) in self.bad_records.items()]
        return sorted(bad, key=lambda record: record.index)

    def note(
        self, metrics: dict[str, Any], checkpoint: CheckpointSpec | None, stopping: EarlyStoppingSpec | None
    ) -> bool:
        """Add the metrics of an epoch that ended. Returns whether it is the best one so far."""
        self.epochs.append(metrics)
        improved = False
        if checkpoint is not None and checkpoint.best is not None and checkpoint.best in metrics:
            name, value = checkpoint.best, metrics[checkpoint.best]
            improved = better(name, value, self.best["value"] if self.best else None)
            if improved:
                self.best = {"step": self.step, "epoch": metrics["epoch"], "metric": name, "value": value}
        if stopping is not None and stopping.metric in metrics:
            value = metrics[stopping.metric]
            if better(stopping.metric, value, self.goal, stopping.min_delta):
                self.goal, self.waited = value, 0
            else:
                self.waited += 1
                self.finished = self.waited >= stopping.patience
        return improved


def better(metric: str, value: float | None, than: float | None, by: float = 0.0) -> bool:
    """Whether a measure improved by more than `by`: accuracy or F1 rose, or loss fell.

    NaN never does, and beats nothing.
    """
    if value is None or math.isnan(value):
        return False
    if than is None:
        return True
    gain = value - than if metric.endswith(("accuracy", "f1")) else than - value
    return gain > by


class State:
    """What a training changes at each step, to be copied to a checkpoint and put back from one, in place."""

    def __init__(self, module: nn.Module, step: TrainingStep, device: torch.device) -> None:
        self.device = device
        self._module, self._step = module, step

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors by file of the checkpoint and name. Raises ModelError as `weights` does."""
        buffers = {f"buffer.{n}": t for n, t in self._live.unsaved().items()}
        steps = {f"step.{n}": t for n, t in self._step.state_dict().items()}
        return {MODEL: self._live.weights(), STATE: {**buffers, **steps}}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The weights that are trained, by name."""
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def not_finite(self) -> str | None:
        """The name of a trained weight that holds NaN or infinity, if there is one."""
        return next((name for name, p in self.trained.items() if not p.isfinite().all()), None)

    def restore(self, kept: Checkpoint, *, rank: int = 0) -> tuple[Progress, Steps]:
        """Put weights, optimizer, buffers and random generators into the state of a checkpoint. Raises Damaged."""
        state = kept.tensors(STATE)
        self._module.load_state_dict(kept.tensors(MODEL))
        with torch.no_grad():
            for name, buffer in unsaved(self._module).items():
                buffer.copy_(state[f"buffer.{name}"])
        step = {name.removeprefix("step."): t for name, t in state.items() if name.startswith("step.")}
        self._step.load_state_dict(step)
        random = kept.sheet["random"]
        restore_random(random[OTHER_RANKS][rank - 1] if rank else random, self.device)
        return Progress(**kept.sheet["progress"]), Steps(kept.tensors(STEPS))

    @cached_property
    def _live(self) -> Live:
        return Live(self._module)


class Live:
    """The tensors of a module's state, found again and again without its state dict, which takes milliseconds.

    If hooks put anything else into the state dict, it is made each time. The module must keep its children.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises ModelError as `weights` does."""
        self._module = module
        owners = _owners(module)
        state = weights(module)
        plain = all(name in owners and lies(getattr(*owners[name])) == lies(tensor) for name, tensor in state.items())
        self._weights = {name: owners[name] for name in state} if plain else None
        self._unsaved = {name: owners[name] for name in unsaved(module)}

    def weights(self) -> dict[str, torch.Tensor]:
        """The module's state dict. Raises ModelError as `weights` does."""
        return weights(self._module) if self._weights is None else _at(self._weights)

    def unsaved(self) -> dict[str, torch.Tensor]:
        """Buffers that are not in the state dict."""
        return _at(self._unsaved)


_Places = dict[str, tuple[nn.Module, str]]


def _owners(module: nn.Module) -> _Places:
    """The child that holds each parameter and buffer, and its name there."""
    owners: _Places = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, _ in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
            owners[f"{prefix}.{name}" if prefix else name] = (child, name)
    return owners


def _at(places: _Places) -> dict[str, torch.Tensor]:
    return {name: getattr(child, held) for name, (child, held) in places.items()}


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state dict. Raises ModelError if it holds anything but dense tensors."""
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"train.checkpoint: {name} of the model's state is a {type(value).__name__}, not a tensor")
        if not is_dense(value):
            raise ModelError(f"train.checkpoint: {name} of the model's state is not dense; a checkpoint cannot hold it")
    return dict(state)


def unsaved(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are not in the module's state dict."""
    state = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}


def seed_random(seed: int, device: torch.device, *, rank: int = 0) -> None:
    """Start all random generators that a step may draw from with one seed, another one on each rank."""
    if rank:
        seed = int(np.random.SeedSequence([seed % 2**64, rank]).generate_state(1, np.uint64)[0])
    devices.seed(seed % 2**63, device)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of these generators, as JSON-able values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }
    if devices.able(device).random_states:
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def restore_random(states: dict[str, Any], device: torch.device) -> None:
    """Inverse of `random_states`. A state of CUDA is ignored on another device."""
    torch.set_rng_state(_bytes(states["torch"]))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if devices.able(device).random_states and "cuda" in states:
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
