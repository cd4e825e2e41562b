"""What model and loss keep in Python from step to step, such as a count of their calls. No checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nimble_jobs.engine.attributes import attributes
from nimble_jobs.engine.contents import tensors_in
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.same_bytes import same_bytes
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.step.eager import Objective
from nimble_jobs.planner.step.request import StepRequest
from nimble_jobs.workloads.training.step.own_loss import OwnLoss


def remembered(request: StepRequest) -> tuple[str, ...]:
    """The names of attributes of the model, and of globals of the loss, that a step changes.

    What the first call caches for later ones does not count. The step runs in eager, and everything is restored
    afterwards.
    """
    device = request.x.device
    objective = Objective(request, device)
    with restoring_state(objective, device), torch.enable_grad():
        before = _held(objective, request)
        objective(request.x, request.y)
        first = _held(objective, request)
        if not _changed(before, first):
            return ()
        objective(request.x, request.y)
        return _changed(first, _held(objective, request))


def _held(objective: Objective, request: StepRequest) -> dict[str, Any]:
    """All that a checkpoint does not hold, by name."""
    found = {name.removeprefix("module."): v for name, v in attributes(objective).items()}
    found["train.loss"] = found.pop("_loss")
    if isinstance(request.loss, OwnLoss):
        found |= {f"{name} of train.loss": value for name, value in request.loss.values.items()}
    saved = {id(t) for t in (*objective.parameters(), *objective.buffers())}
    for name, tensor in tensors_in(objective).items():
        if id(tensor) not in saved and tensor.grad_fn is None and is_dense(tensor):
            found[name.removeprefix("module.")] = tensor.detach().clone()
    return found


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    names = dict.fromkeys((*before, *now))
    found = [n for n in names if n not in before or n not in now or not _same(before[n], now[n])]
    closer = any(name.endswith(" of train.loss") for name in found)  # "train.loss" says less
    return tuple(name for name in found if not closer or name != "train.loss")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and same_bytes(one, other)
    return type(one) is type(other) and (bool(one == other) or repr(one) == repr(other))  # NaN equals no NaN
