"""The second half of a training step: unscale, clip, update. All of its state is in tensors that never move.

The updates are torch's own fused kernels. Their state is allocated, with zeros, before the first step, so all steps are
alike and one recording serves for each. Dynamic loss scaling works as in torch.amp.GradScaler (Micikevicius et al.,
Mixed Precision Training, 2018), but without a read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from nimble_jobs.engine.private.operators import multiply_, unscale_, update_scale_
from nimble_jobs.engine.private.tensors import storage_id
from nimble_jobs.errors import UsageError
from nimble_jobs.planner.step.request import OptimizerRecipe, StepRequest, Tensors

_SCALE, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000
_SLOTS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one update of the weights reports."""

    found_inf: torch.Tensor | None  # bool, zero-dimensional: the update was skipped; None without loss scaling
    grad_norm: torch.Tensor | None  # of all gradients, before they were clipped


class Optimizer:
    """Updates parameters by their gradients."""

    def __init__(self, request: StepRequest, device: torch.device) -> None:
        recipe = request.optimizer
        self.recipe = recipe
        self._clip_norm = request.clip_norm
        self._parameters: dict[str, torch.Tensor] = dict(request.parameters)
        names = _SLOTS[recipe.name] if recipe.name != "sgd" or recipe.momentum else ()
        self.slots = {slot: {n: torch.zeros_like(p) for n, p in self._parameters.items()} for slot in names}
        if recipe.name != "sgd":
            self.slots["step"] = {n: torch.zeros((), device=device) for n in self._parameters}
        self.lr = torch.zeros((), device=device)
        self.scale: torch.Tensor | None = None
        if request.precision == "fp16":
            self.scale = torch.full((), _SCALE, device=device)
            self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors that outlast a step, by name."""
        found = {f"optimizer.{n}.{slot}": t for slot, tensors in self.slots.items() for n, t in tensors.items()}
        if self.scale is not None:
            found |= {"scaler.scale": self.scale, "scaler.growth_tracker": self._growth}
        return found

    def follow_layout(self) -> None:
        """Give the slots the memory layout of their parameters, as fused kernels require. No value changes."""
        for slot, tensors in self.slots.items():
            if slot != "step":
                self.slots[slot] = {n: laid_out_as(t, self._parameters[n]) for n, t in tensors.items()}

    def apply(self, gradients: Tensors, *, apart: bool = False) -> Update:
        """Update the parameters that have a gradient, in place; gradients are overwritten.

        `apart` says that no two of them overlap. Skipped if loss scaling finds one that is not finite.
        """
        gradients = gradients if apart else _apart(gradients)
        given = list(gradients.values())
        found_inf = None
        if self.scale is not None:
            found_inf = torch.zeros_like(self.scale)
            unscale_(given, found_inf, self.scale.reciprocal())
        norm = None
        if self._clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(given)
            multiply_(given, torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        by_decay: dict[float, list[str]] = {}
        for name in gradients:
            by_decay.setdefault(self.recipe.weight_decay_of(name), []).append(name)
        for decay, names in by_decay.items():
            for is_complex in (False, True):  # fused kernels take real numbers only
                alike = [n for n in names if gradients[n].is_complex() is is_complex]
                if alike:
                    self._update(alike, [gradients[n] for n in alike], decay, found_inf, fused=not is_complex)
        if self.scale is not None and found_inf is not None:
            update_scale_(self.scale, self._growth, found_inf, growth=_GROWTH, backoff=_BACKOFF, interval=_INTERVAL)
        return Update(found_inf=None if found_inf is None else found_inf > 0, grad_norm=norm)

    def _update(
        self,
        names: Sequence[str],
        gradients: list[torch.Tensor],
        weight_decay: float,
        found_inf: torch.Tensor | None,
        *,
        fused: bool,
    ) -> None:
        recipe: OptimizerRecipe = self.recipe
        parameters = [self._parameters[n] for n in names]
        slots = {slot: [tensors[n] for n in names] for slot, tensors in self.slots.items()}
        if recipe.name == "sgd":
            sgd(
                parameters,
                gradients,
                list(slots.get("momentum_buffer", [None] * len(names))),
                fused=fused,
                foreach=False,
                found_inf=found_inf,
                weight_decay=weight_decay,
                momentum=recipe.momentum,
                lr=self.lr,  # type: ignore[arg-type]  # its stub has not heard of tensors
                dampening=0.0,
                nesterov=recipe.nesterov,
                maximize=False,
            )
            return
        adam(
            parameters,
            gradients,
            slots["exp_avg"],
            slots["exp_avg_sq"],
            [],
            slots["step"],
            fused=fused,
            foreach=False,
            found_inf=found_inf,
            decoupled_weight_decay=recipe.name == "adamw",
            amsgrad=False,
            beta1=recipe.betas[0],
            beta2=recipe.betas[1],
            lr=self.lr,
            weight_decay=weight_decay,
            eps=recipe.eps,
            maximize=False,
        )


def _apart(gradients: Tensors) -> dict[str, torch.Tensor]:
    """The gradients, each in memory of its own, because autograd may return the same tensor for two parameters."""
    seen: set[int] = set()
    apart = {}
    for name, gradient in gradients.items():
        apart[name] = gradient.clone() if storage_id(gradient) in seen else gradient
        seen.add(storage_id(gradient))
    return apart


def laid_out_as(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it has the memory layout of `model`, else a copy in that layout, with equal strides."""
    found = seen_as(tensor, model)
    return found if found is not None else torch.empty_like(model).copy_(tensor)


def seen_as(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor | None:
    """The tensor with the strides of `model`, if both have the same shape and memory layout, else None."""
    if tensor.stride() == model.stride():
        return tensor
    if all(n == 1 or a == b for n, a, b in zip(model.shape, tensor.stride(), model.stride(), strict=True)):
        return tensor.as_strided(model.shape, model.stride())  # strides of dimensions of size one mean nothing
    return None


def load_state(live: Tensors, given: Tensors) -> None:
    """Copy values into live tensors, exactly. Raises UsageError, naming the tensor, if they do not fit."""
    for name in live.keys() ^ given.keys():
        where = "is missing" if name in live else "is not known"
        raise UsageError(f"the state of the training step does not fit: {name!r} {where}")
    for name, tensor in live.items():
        value = given[name]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise UsageError(
                f"the state of the training step does not fit: {name!r} is {value.dtype}{list(value.shape)}; "
                f"expected {tensor.dtype}{list(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(given[name])
