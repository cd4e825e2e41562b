"""Calls that fill a buffer of ours instead of allocating one: for each operator its `out=` variant, where it has one.

The memory plan can place such a buffer by what the streams prove; what an operator allocates comes from the caching
allocator, which keeps every stream's blocks apart.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from nimble_jobs.engine.private import conv_backend, has_kernel

Call = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]

_SEVERAL_OUTPUTS = {"aten.max_pool2d_with_indices.default"}  # whose variants fill just what the operator returns


def into_buffers(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call | None:
    """The same work as a call that writes into `result`, by the same kernels; None where there is none."""
    if str(op) == "aten.convolution.default":
        return _convolution(args, result)
    returned = [result] if isinstance(result, torch.Tensor) else list(result) if _is_tuple(result) else []
    if not returned or (len(returned) > 1 and str(op) not in _SEVERAL_OUTPUTS):
        return None
    found = _variant(op, returned[0].device.type)
    if found is None:
        return None
    variant, names = found
    return variant, args, {**kwargs, **dict(zip(names, returned, strict=True))}


def _is_tuple(result: Any) -> bool:
    return isinstance(result, tuple) and all(isinstance(r, torch.Tensor) for r in result)


@functools.cache
def _variant(op: torch._ops.OpOverload, device: str) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The overload that takes the same arguments and fills as many tensors, if it has a kernel of its own."""
    if op.namespace != "aten" or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        variant = getattr(packet, name)
        arguments = variant._schema.arguments
        filled = tuple(a.name for a in arguments if a.is_out)
        given = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if filled and given == wanted and len(filled) == len(op._schema.returns) and has_kernel(variant, device):
            return variant, filled
    return None


def _convolution(args: tuple[Any, ...], result: torch.Tensor) -> Call | None:
    """Convolutions have variants only a level lower, one for each library."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if result.device.type != "cuda" or x.dim() not in (4, 5) or not result.numel():
        return None
    backend = conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if backend == "Cudnn" and bias is None:
        settings = torch.backends.cudnn
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        switches = (settings.benchmark, deterministic, settings.allow_tf32)
        op = torch.ops.aten.cudnn_convolution.out
        return op, (x, weight, padding, stride, dilation, groups, *switches), {"out": result}
    if backend == "CudaDepthwise2d":
        kernel = list(weight.shape[2:])
        op = torch.ops.aten._conv_depthwise2d.out
        return op, (x, weight, kernel, bias, stride, padding, dilation), {"out": result}
    return None
