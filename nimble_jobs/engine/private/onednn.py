"""Private operators of torch over oneDNN: convolutions and linear layers whose weights are laid out beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NAMES = ("_convolution_pointwise", "_linear_pointwise", "_reorder_convolution_weight", "_reorder_linear_weight")
_ROWS = 128  # what weights of linear layers are laid out for; that serves fewer and more rows as well

Settings = Sequence[Any]  # of a convolution, in the order of the operators: padding, stride, dilation, groups
Activation = tuple[str, tuple[float, ...], str]  # name, numbers, algorithm: as oneDNN's operators in torch take them


def has_onednn() -> bool:
    """Whether this torch has the operators, and may use them."""
    library: Any = torch.backends.mkldnn
    return library.is_available() and library.enabled and all(hasattr(torch.ops.mkldnn, name) for name in _NAMES)


def computes_in(dtype: torch.dtype) -> bool:
    """Whether this processor's oneDNN has kernels for a type of numbers."""
    ops: Any = torch.ops.mkldnn
    if dtype is torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def pack_convolution(
    weight: torch.Tensor,
    settings: Settings,
    input_size: Sequence[int],
) -> torch.Tensor:
    """A convolution's weight in the layout that oneDNN prefers for such an input, as a tensor that only it can read."""
    op: Any = torch.ops.mkldnn._reorder_convolution_weight
    packed: torch.Tensor = op(weight, *settings, list(input_size))
    return packed


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """A linear layer's weight [out, in], likewise."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Settings,
    activation: Activation,
) -> torch.Tensor:
    """The activation of a convolution over a packed weight."""
    op: Any = torch.ops.mkldnn._convolution_pointwise
    result: torch.Tensor = op(x, weight, bias, *settings, *_listed(activation))
    return result


def add_convolution_(
    other: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Settings,
) -> None:
    """Add a convolution over a packed weight to `other`, in place."""
    op: Any = torch.ops.mkldnn._convolution_pointwise_.binary
    op(other, x, weight, bias, *settings, "add", 1.0, None, [], None)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    """The activation of a linear layer over a packed weight."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, *_listed(activation))
    return result


def _listed(activation: Activation) -> tuple[str, list[float], str]:
    name, numbers, algorithm = activation
    return name, list(numbers), algorithm
