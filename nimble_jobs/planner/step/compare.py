"""Is a training step right? Values, gradients and statistics against those of eager, with the slack that sums need."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from nimble_jobs.engine import verify
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.state import writable
from nimble_jobs.errors import CheckFailed

# Gradients add up over the batch and pass through every layer: where eager's own order of additions is changed they
# move by more than the outputs do.
GRADIENT_SLACK = 10.0
NOISE = 1e-3  # gradients below this share of the largest, by root mean square, are rounding errors of zero

__all__ = ["GRADIENT_SLACK", "NOISE", "compare", "copies", "put", "rms", "seed_device", "writable"]

Tensors = Mapping[str, torch.Tensor]


def compare(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, floor: float) -> float:
    """The relative norm of the difference; for what is around zero, relative to the floor instead.

    Raises CheckFailed, with the name, above the tolerance.
    """
    error = verify.relative_norm(found, expected)
    if math.isfinite(error) and rms(expected) < floor:
        error *= rms(expected) / floor
    elif not math.isfinite(error) and floor and not bool(expected.any()) and bool(torch.isfinite(found).all()):
        error = rms(found) / floor
    if not error <= tolerance:
        raise CheckFailed(
            f"{name!r} differs from eager by a relative norm of {error:.3g}; the tolerance is {tolerance:.3g}",
            error=error if math.isfinite(error) else None,
        )
    return error


def rms(tensor: torch.Tensor) -> float:
    """Root mean square."""
    return float(verify.in_double(tensor).norm()) / math.sqrt(max(1, tensor.numel()))


def seed_device(seed: int, device: torch.device) -> None:
    """Set the random states of the host and of this device, and of no other."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of tensors, to put back later."""
    return {n: t.detach().clone() for n, t in tensors.items()}


def put(tensors: Tensors, values: Tensors) -> None:
    """Write values into tensors, by name; one whose shape was changed gets its own back."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if is_dense(tensor) and tensor.shape != values[name].shape:
                tensor.data = values[name].clone()
            else:
                tensor.copy_(values[name])
