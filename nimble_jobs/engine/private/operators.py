"""Private names around operators: schemas, random numbers, kernels, and calls over lists of tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch

# Batch normalisation in training mode advances its running statistics, which its schemas do not declare:
# position and name of the arguments written, and of the flag that makes it so.
_BATCH_NORM = (((3, "running_mean"), (4, "running_var")), (5, "training"))
_UNDECLARED_WRITES = {
    "aten.native_batch_norm.default": _BATCH_NORM,
    "aten.cudnn_batch_norm.default": _BATCH_NORM,
    "aten.miopen_batch_norm.default": _BATCH_NORM,
}

# Operators that leave out what their backward needs unless gradients are on.
_WANT_GRAD_MODE = {"aten.mkldnn_rnn_layer.default"}

OpOverload = torch._ops.OpOverload


def write_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that this call of the operator writes."""
    declared, undeclared = _writes(op)
    if undeclared is None:
        return declared
    written, (position, flag) = undeclared
    return written if (args[position] if position < len(args) else kwargs.get(flag)) else ()


@functools.cache
def _writes(op: OpOverload) -> tuple[tuple[tuple[int, str], ...], Any]:
    """What the schema declares, and what it should have declared instead."""
    declared = tuple(
        (i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    return declared, None if declared else _UNDECLARED_WRITES.get(str(op))


@functools.cache
def nests(op: OpOverload) -> bool:
    """Whether the operator makes a nested tensor of a padding mask."""
    return str(op._schema.name).startswith("aten::_nested_tensor_from_mask")


def write_only_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of the `out=` arguments, which are filled and not read."""
    return tuple(a.name for a in op._schema.arguments if a.is_out)


def draws_random(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of the operator draws from a generator. Attention and cuDNN's recurrent layers do only where
    their dropout is not zero, the latter only in training; attention's backward never does: it is given the forward's
    seeds.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags or "_attention_backward" in str(op):
        return False
    given = {a.name: a.default_value for a in op._schema.arguments} | kwargs
    given |= {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)}
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    if str(op) == "aten._cudnn_rnn.default":
        return bool(given["dropout"] and given["train"])
    return True


def returns_unused_seeds(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what the call returns on the host is only the seed of a dropout that did not happen: attention's."""
    return "_attention" in str(op) and not draws_random(op, args, kwargs)


def returns_seeds(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call returns the seeds of a dropout, for its backward to draw the same mask: attention's.

    They lie on the host while nothing is captured, and on the device inside of a capture.
    """
    return "_attention" in str(op) and draws_random(op, args, kwargs)


def has_kernel(op: OpOverload, device: str) -> bool:
    """Whether the operator was written for this type of device, and is not made of others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C._dispatch_key_for_device(device)))


def conv_backend(*args: Any) -> str:
    """The library that `aten.convolution` takes for these arguments."""
    return str(torch._C._select_conv_backend(*args).name)


def wants_grad_mode(name: str) -> bool:
    """Whether an operator returns less without gradients."""
    return name in _WANT_GRAD_MODE


def unscale_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply gradients by `inverse_scale` in place; `found_inf` becomes 1 where one of them is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth: float,
    backoff: float,
    interval: int,
) -> None:
    """Shrink the scale of the loss after a step that was skipped, let it grow after `interval` steps that were not."""
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval)


def add_(tensors: list[torch.Tensor], others: list[torch.Tensor] | float) -> None:
    """Add to each tensor, in place, the other of its place or one number, with few kernels for all."""
    torch._foreach_add_(tensors, others)


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by one factor, in place, with few kernels for all."""
    torch._foreach_mul_(tensors, factor)


def zero_(tensors: list[torch.Tensor]) -> None:
    """Set all tensors to zero with few kernels."""
    torch._foreach_zero_(tensors)


def copy_(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Copy each of the others into the tensor of its place, with few kernels for all."""
    torch._foreach_copy_(tensors, others)
