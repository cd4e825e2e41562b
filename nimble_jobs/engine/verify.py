"""Is a replay right? Compared with eager execution on fresh random input, over poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import CheckFailed
from nimble_jobs.schedule import Port

# Largest accepted relative norm against eager, by the model's dtype: kernels may add in another order, no more.
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
ROUNDS = 2
_SMALL = 1 << 18  # elements; loading a dozen operators onto a GPU takes a new process longer than copying so many
_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})


def random_inputs(
    ports: tuple[Port, ...],
    device: torch.device,
    seed: int,
    below: int = 2,
    integers: Mapping[str, torch.Tensor] = _NONE,
) -> dict[str, torch.Tensor]:
    """Fresh input for each port: normal for floating types, integers in [0, below) for the rest.

    Ports named in `integers` get those values in another order, which no index can be overrun by; lists of one
    dimension, which may be sorted offsets, as they are.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    made = {}
    for port in ports:
        kind = dtype(port.view.dtype)
        if kind.is_floating_point or kind.is_complex:
            drawn = torch.complex64 if kind.is_complex else torch.float32
            value = torch.randn(port.view.shape, generator=generator, dtype=drawn).to(kind)
        elif port.name in integers:
            value = integers[port.name].cpu()
            if value.dim() > 1:
                value = value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)
        else:
            value = torch.randint(0, below, port.view.shape, generator=generator).to(kind)
        made[port.name] = value.to(device)
    return made


def relative_norm(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| in float64; infinite where NaN or Inf stand in different places.

    A complex number counts as two.
    """
    if found.shape != expected.shape or found.is_complex() != expected.is_complex():
        return float("inf")
    if expected.numel() <= _SMALL:
        found, expected = found.cpu(), expected.cpu()
    a, b = in_double(found), in_double(expected)
    difference, scale = torch.stack([(a - b).norm(), b.norm()]).tolist()
    if math.isfinite(difference) and scale > 0:
        return float(difference / scale)
    finite = torch.isfinite(b)
    same_specials = torch.allclose(a[~finite], b[~finite], rtol=0, atol=0, equal_nan=True)
    if not same_specials or not bool(torch.isfinite(a[finite]).all()):
        return float("inf")
    a, b = a[finite], b[finite]
    scale = float(b.norm())
    difference = float((a - b).norm())
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """The values as float64, in one dimension; a complex number is two."""
    found = tensor.detach()
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())
    return found.double().flatten()


def poison(instance: Instance) -> None:
    """Overwrite the outputs, so that what a replay does not write cannot pass for its result."""
    for tensor in instance.outputs.values():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def check(
    instance: Instance,
    eager: Callable[..., Any],
    ports: tuple[Port, ...],
    device: torch.device,
    *,
    tolerance: float,
    seed: int,
    below: int = 2,
    integers: Mapping[str, torch.Tensor] = _NONE,
) -> float:
    """Compare replays with eager calls on fresh input; the largest relative norm found.

    Raises CheckFailed where it is above `tolerance`, naming the output.
    """
    worst = 0.0
    for turn in range(ROUNDS):
        inputs = random_inputs(ports, device, seed + turn, below, integers)
        with torch.no_grad():  # the model may write into what it is given
            result = eager(*(t.clone() for t in inputs.values()))
            expected = {n: t.clone() for n, t in flatten_outputs(result).items()}
        found = run_once(instance, inputs)
        synchronize(device)
        if found.keys() != expected.keys():
            raise CheckFailed(f"the replay has the outputs {sorted(found)}, eager has {sorted(expected)}")
        for name, tensor in expected.items():
            error = relative_norm(found[name], tensor)
            if not error <= tolerance:
                raise CheckFailed(
                    f"output {name!r} differs from eager by a relative norm of {error:.3g}; "
                    f"the tolerance is {tolerance:.3g}",
                    error=error if math.isfinite(error) else None,
                )
            worst = max(worst, error)
    return worst


def run_once(instance: Instance, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy inputs in, poison the outputs, replay; the instance's own output tensors."""
    for name, tensor in inputs.items():
        instance.inputs[name].copy_(tensor)
    poison(instance)
    instance.replay()
    return instance.outputs
