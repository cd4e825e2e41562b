"""Replaces an operator by its `out=` variant, if it has one, so that it fills our buffer instead of allocating its own.

The memory plan can then place the buffer anywhere the streams prove to be safe. Memory that an operator allocates comes
from the caching allocator, which never shares a block between streams.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from nimble_jobs.engine.private.operators import OpOverload, conv_backend, has_kernel

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]

# Parts of the names of operators whose variants use the buffer as scratch memory, with another shape.
_SCRATCH = ("loss", "entropy")
# Operators with several outputs whose variants fill exactly these.
_SEVERAL_OUTPUTS = {"aten.max_pool2d_with_indices.default"}


def into_buffers(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call | None:
    """The same work as a call that writes into `result`, by the same kernels; None where there is none.

    As a test, the variant is called once over memory with other contents, and must produce the same bits.
    """
    if str(op) == "aten.convolution.default":
        return _convolution(args, result)
    returned = [result] if isinstance(result, torch.Tensor) else list(result) if _is_tuple(result) else []
    if not returned or (len(returned) > 1 and str(op) not in _SEVERAL_OUTPUTS):
        return None
    out_variant = _variant(op, returned[0].device.type)
    if out_variant is None:
        return None
    variant, names = out_variant
    wanted = dict(zip(names, returned, strict=True))
    return (variant, args, {**kwargs, **wanted}) if _fills(variant, args, kwargs, wanted) else None


def _fills(variant: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether the variant gives these tensors bit for bit, and touches nothing else of what it is given to fill."""
    given = {name: _poisoned(tensor) for name, tensor in wanted.items()}
    before = {name: (t.data_ptr(), t.shape, t.stride()) for name, t in given.items()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a resized buffer, which the comparison below detects
            variant(*args, **kwargs, **given)
    except RuntimeError:
        return False
    kept = {name: (t.data_ptr(), t.shape, t.stride()) for name, t in given.items()}
    return kept == before and all(torch.equal(_bytes(given[name]), _bytes(t)) for name, t in wanted.items())


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    storage = torch.full((like.untyped_storage().nbytes(),), 0xFF, dtype=torch.uint8, device=like.device)
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_tuple(result: Any) -> bool:
    return isinstance(result, tuple) and all(isinstance(r, torch.Tensor) for r in result)


@functools.cache
def _variant(op: OpOverload, device: str) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The overload that takes the same arguments and fills as many tensors, if it has a kernel of its own."""
    if op.namespace != "aten" or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if any(word in str(op) for word in _SCRATCH):
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
    """The `out=` call of a convolution. Only the operators one level below have such variants, one for each library."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if result.device.type != "cuda" or x.dim() not in (4, 5) or not result.numel():
        return None
    backend = conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if backend == "Cudnn" and bias is None:
        settings: Any = torch.backends.cudnn
        tf32 = settings.conv.fp32_precision == "tf32"  # the older switch raises if a program has used both kinds
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        switches = (settings.benchmark, deterministic, tf32)
        op = torch.ops.aten.cudnn_convolution.out
        return op, (x, weight, padding, stride, dilation, groups, *switches), {"out": result}
    if backend == "CudaDepthwise2d":
        kernel = list(weight.shape[2:])
        op = torch.ops.aten._conv_depthwise2d.out
        return op, (x, weight, kernel, bias, stride, padding, dilation), {"out": result}
    return None
