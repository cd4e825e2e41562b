"""What our operators return, as compilers are told: of the shape, dtype and strides that calling them gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d

from nimble_jobs.engine import fused_convolutions
from nimble_jobs.kernels import depthwise_activated, pointwise, product_gelu, separable, split_k

LAST = torch.channels_last
WAY = "64x64x32/4"  # of split_k; in four parts


def images(channels: int) -> torch.Tensor:
    return torch.randn(2, channels, 13, 10).contiguous(memory_format=LAST)


def weights(features: int, channels: int, *window: int) -> torch.Tensor:
    return torch.randn(features, channels, *window).contiguous(memory_format=LAST)


def agree(operator: Any, args: Sequence[Any], expected: torch.Tensor | None = None) -> None:
    """`expected`: what a call returns, for operators that cannot be called here."""
    found = operator(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
    wanted = operator(*args) if expected is None else expected
    assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    assert found.is_meta


@pytest.mark.parametrize("window", [(3, 3), (5, 3), (1, 1)])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 2, 1)])
def test_convolutions(window: tuple[int, int], stride: int, padding: int, dilation: int) -> None:
    x, bias, weight, given = images(8), torch.randn(12), weights(12, 8, *window), (stride, padding, dilation)
    depth, second, pairs = weights(8, 1, *window), weights(12, 8, 1, 1), [[n, n] for n in given]
    whole = conv2d(x, weight, bias, *given).contiguous(memory_format=LAST)
    agree(split_k.CONVOLUTION, (x, weight, *pairs[:2], WAY, pairs[2]))
    agree(fused_convolutions.CONVOLUTION_RELU, (x, weight, bias, *pairs, 1), whole)
    agree(fused_convolutions.CONVOLUTION_ADD_RELU, (x, weight, whole, bias, *pairs, 1), whole)
    grouped = conv2d(x, weights(12, 4, *window), bias, *given, 2).contiguous(memory_format=LAST)
    agree(fused_convolutions.CONVOLUTION_RELU, (x, weights(12, 4, *window), bias, *pairs, 2), grouped)
    agree(depthwise_activated.OPERATOR, (x, depth, torch.randn(8), *given, "silu"))
    agree(separable.OPERATOR, (x, depth, torch.randn(8), second, bias, whole, *given, True, "relu", "silu", ""))
    agree(separable.OPERATOR, (x, depth, None, second, bias, None, *given, False, "", "", ""))


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_pointwise_convolutions(stride: int) -> None:
    x, weight, bias = images(8), weights(12, 8, 1, 1), torch.randn(12)
    other = conv2d(x, weight, bias, stride).contiguous(memory_format=LAST)
    agree(pointwise.OPERATOR, (x, weight, bias, other, "relu", "", stride))
    agree(pointwise.OPERATOR, (x, weight, None, None, "", "", stride))


@pytest.mark.parametrize("sizes", [(7, 8), (2, 7, 8), (2, 3, 7, 8)])
def test_products(sizes: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(*sizes), torch.randn(12, 8), torch.randn(12)
    agree(product_gelu.OPERATOR, (x, weight, bias, ""))
    agree(split_k.PRODUCT, (x, weight, WAY))
