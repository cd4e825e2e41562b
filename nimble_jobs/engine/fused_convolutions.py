"""Operators for cuDNN's fused convolutions, over channels-last tensors.

They wrap torch's `cudnn_convolution_relu` and `cudnn_convolution_add_relu`, which give compilers no shape functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nimble_jobs.engine.private.operators import OpOverload

MEMORY_FORMAT = torch.channels_last
_aten = torch.ops.aten
_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define(
    "convolution_relu(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
_LIBRARY.define(
    "convolution_add_relu(Tensor x, Tensor weight, Tensor z, Tensor? bias, int[] stride, int[] padding,"
    " int[] dilation, int groups) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def _convolution_relu(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    x = x.contiguous(memory_format=MEMORY_FORMAT)  # no copy: only the strides of dimensions of size one can differ
    return _aten.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)


def _convolution_add_relu(
    x: Any, weight: Any, z: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    x, z = (t.contiguous(memory_format=MEMORY_FORMAT) for t in (x, z))
    return _aten.cudnn_convolution_add_relu(x, weight, z, None, bias, stride, padding, dilation, groups)


def convolved_like(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """An uninitialised tensor of the shape and dtype of a two-dimensional convolution's result, in channels-last.

    For compilers, which ask three times for each operator what it returns, and need no values.
    """
    places = [
        (size + 2 * pad - spread * (window - 1) - 1) // step + 1
        for size, window, step, pad, spread in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    sizes = (x.shape[0], weight.shape[0], *places)
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=MEMORY_FORMAT)


def _shape_of(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    return convolved_like(x, weight, stride, padding, dilation)


def _shape_of_sum(x: Any, weight: Any, z: Any, *rest: Any) -> Any:
    return _shape_of(x, weight, *rest)


_LIBRARY.impl("convolution_relu", _convolution_relu, "CUDA")
_LIBRARY.impl("convolution_add_relu", _convolution_add_relu, "CUDA")
_LIBRARY.impl("convolution_relu", _shape_of, "Meta")
_LIBRARY.impl("convolution_add_relu", _shape_of_sum, "Meta")

CONVOLUTION_RELU: OpOverload = getattr(torch.ops, _NAMESPACE).convolution_relu.default
CONVOLUTION_ADD_RELU: OpOverload = getattr(torch.ops, _NAMESPACE).convolution_add_relu.default
