"""What a training step should do, as values: the model, the loss, the optimizer, and how they are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from nimble_jobs.errors import UsageError
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.sources.source import Source

Tensors = Mapping[str, torch.Tensor]  # by name
Precision = Literal["fp32", "bf16", "fp16"]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """One of torch's optimizers, with its defaults. The learning rate is given at each step."""

    name: Literal["sgd", "adam", "adamw"]
    momentum: float = 0.0  # sgd
    nesterov: bool = False  # sgd
    betas: tuple[float, float] = (0.9, 0.999)  # adam, adamw
    eps: float = 1e-8  # adam, adamw
    weight_decay: float = 0.0  # of parameters that no group names
    groups: tuple[tuple[tuple[str, ...], float], ...] = ()  # names of parameters, and their weight decay

    def __post_init__(self) -> None:
        if self.name not in ("sgd", "adam", "adamw"):
            raise UsageError(f"optimizer: found {self.name!r}; expected sgd, adam or adamw")
        if self.nesterov and not self.momentum:
            raise UsageError("optimizer.nesterov: needs a momentum above 0")
        named = [name for names, _ in self.groups for name in names]
        twice = next((n for n in named if named.count(n) > 1), None)
        if twice is not None:
            raise UsageError(f"optimizer.groups: the parameter {twice!r} is in two groups")

    def weight_decay_of(self, parameter: str) -> float:
        """The weight decay of the parameter's group; without a group, the recipe's own."""
        return next((decay for names, decay in self.groups if parameter in names), self.weight_decay)


@dataclass(eq=False)
class Shared:
    """State that the steps of one training share if its batches have several shapes. Weights lie in their module."""

    state: Any = None  # `_StepState` of eager.py; None until the first step is made


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How several processes, each with a device, train one model: each takes an equal share of every batch."""

    count: int
    bucket_bytes: int = 25 << 20  # of gradients that are summed together, unless one alone is larger

    def __post_init__(self) -> None:
        if self.count < 2:
            raise UsageError(f"ranks: found {self.count}; expected at least 2")


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """One training step: forward, loss, backward, clipping, optimizer."""

    module: nn.Module  # on the device, in training mode; frozen parameters do not require grad
    x: torch.Tensor  # an example: shape and dtype of a whole batch
    y: torch.Tensor  # likewise, of its labels or targets
    loss: Loss  # (what the module returns, y) -> the mean loss, zero-dimensional
    loss_name: str
    optimizer: OptimizerRecipe
    clip_norm: float | None = None  # largest norm of all gradients together
    precision: Precision = "fp32"  # bf16, fp16: under autocast; fp16 with dynamic loss scaling
    accumulate: int = 1  # batches whose gradients are averaged for one step of the optimizer
    options: BuildOptions = field(default_factory=BuildOptions)
    tolerance: float | None = None  # relative norm against eager; None: the default of the dtype
    only: Source | None = None  # what an interrupted training began with: others would give other bits
    ranks: Ranks | None = None  # None: this process alone; otherwise x and y are one rank's share
    shared: Shared | None = None  # with the steps of batches of other shapes; None: there is one shape

    def __post_init__(self) -> None:
        if not self.module.training:
            raise UsageError("module: is in evaluation mode; call its train() before its step is prepared")
        if self.accumulate < 1:
            raise UsageError(f"accumulate: found {self.accumulate}; expected at least 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm: found {self.clip_norm}; expected a number above 0")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise UsageError(f"precision: found {self.precision!r}; expected fp32, bf16 or fp16")
        if not self.parameters:
            raise UsageError("module: has no parameter that requires grad; there is nothing to train")
        unknown = {n for names, _ in self.optimizer.groups for n in names} - dict(self.module.named_parameters()).keys()
        if unknown:
            raise UsageError(f"optimizer.groups: the module has no parameter {min(unknown)!r}")

    @property
    def programs(self) -> tuple[Role, ...]:
        """The programs that the step has, in the order in which they run."""
        return (Role.ACCUMULATE, Role.UPDATE) if self.accumulate > 1 else (Role.UPDATE,)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}
