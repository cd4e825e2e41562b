"""Calls of a module in eager, with inputs that are made up for it: observed, timed, or tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.engine.inputs import Below, draw, like, stand_out, varied
from nimble_jobs.engine.observe import Observed, observe
from nimble_jobs.planner.keys.request import Request
from nimble_jobs.planner.module.limits import numbers_for

_SCALES = (1.0, 1e-6, 1e4, 0.0)  # of random input


def observe_calls(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], device: torch.device, *, keep_integers: bool = True
) -> Observed:
    """`observe` with a few inputs like those given: random ones, at several scales, and factors of their own values.

    Raises CannotRecord.
    """
    below, integers = numbers_for(module), stand_out(inputs) if keep_integers else {}
    others = []
    for turn, scale in enumerate(_SCALES):
        drawn = {}
        generator = torch.Generator().manual_seed(turn)
        for name, tensor in inputs.items():
            if name in integers:
                drawn[name] = varied(tensor.detach().cpu(), generator, turn).to(device)
            else:
                drawn[name] = draw(tensor.shape, tensor.dtype, below, generator=generator, scale=scale, turn=turn).to(
                    device
                )
        others.append(drawn)
    return observe(module, inputs, [*others, like(inputs, 0.5)], device)


def takes(module: nn.Module, inputs: Mapping[str, torch.Tensor], observed: Observed) -> bool:
    """Whether the module can be called with these inputs."""
    try:
        with torch.no_grad():
            module(*(t.clone() for t in inputs.values()))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the caller has inputs that it can be called with
        return False
    finally:
        observed.put_back()
    return True


def time_calls(
    call: Callable[[], object], device: torch.device, observed: Observed, *, budget_s: float = measure.BUDGET_S
) -> float:
    """`measure.time_us` of a call that may change the module: then each sample is one call from the same state."""
    with torch.no_grad():
        try:
            if observed.changing:
                return measure.time_us(call, device, budget_s=budget_s, before=observed.put_back, most=1)
            return measure.time_us(call, device, budget_s=budget_s)
        finally:
            observed.put_back()


def example_of(request: Request, module: nn.Module, device: torch.device) -> torch.Tensor:
    """A batch that a request's model can take: random numbers."""
    empty = torch.empty(request.input_shape, dtype=request.input_dtype, device=device)
    return random_like(empty, numbers_for(module), device)


def random_like(tensor: torch.Tensor, below: Below, device: torch.device) -> torch.Tensor:
    """Random numbers of a tensor's shape and dtype."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.empty_like(tensor, device=device).copy_(draw(tensor.shape, tensor.dtype, below, device=device))
    return draw(tensor.shape, tensor.dtype, below, device=device)
