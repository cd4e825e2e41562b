"""Which tensors differ in their bits, asked of a device as seldom as possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from nimble_jobs.engine.device import able

_PLAIN = (torch.Tensor, nn.Parameter)
_SMALL_BYTES = 1 << 20  # of tensors that are copied together, to be compared at once


def differing(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> list[str]:
    """The names in `some` whose tensor does not equal the one of that name in `others`, as `same_bytes` says.

    A device is waited for once for all its small tensors, unless some of them differ. A model may have hundreds.
    """
    together: defaultdict[torch.device, list[str]] = defaultdict(list)
    for name, tensor in some.items():
        if _can_be_joined(tensor, others[name]):
            together[tensor.device].append(name)
    same = {
        name
        for names in together.values()
        if torch.equal(_joined([some[n] for n in names]), _joined([others[n] for n in names]))
        for name in names
    }
    return [name for name, tensor in some.items() if name not in same and not same_bytes(tensor, others[name])]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors have the same shape, type and bits; quantized ones are compared by value."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.device.type == "meta":
        return True
    if one.is_quantized:  # its bytes cannot be viewed
        return bool(torch.equal(one, other))
    return bool(torch.equal(_bytes(one), _bytes(other)))


def _can_be_joined(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    plain = type(one) in _PLAIN and type(other) in _PLAIN and not one.is_quantized
    return alike and plain and one.nbytes <= _SMALL_BYTES and _waits(one.device)


def _waits(device: torch.device) -> bool:
    """Whether the host waits for each comparison."""
    return device.type != "meta" and able(device).asynchronous


@torch.no_grad()
def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([_bytes(tensor) for tensor in tensors])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
