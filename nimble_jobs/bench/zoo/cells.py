"""Cells found by architecture search, as values, and the module that runs one.

A cell computes states. States 0 and 1 are its inputs, brought to its number of filters; every further state is the sum
of two operations on earlier ones; the output joins some of the states along the channels. NASNet, AmoebaNet and DARTS
differ in the cells and in how they are stacked.

Strided layers pad both sides alike, where TensorFlow pads the right and bottom side more: sizes of outputs are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

Op = tuple[str, int]  # the name of an operation and the state that it reads


@dataclass(frozen=True, kw_only=True)
class CellSpec:
    """One kind of cell: the pairs whose sums are states 2, 3, ..., and the states that make the output."""

    pairs: tuple[tuple[Op, Op], ...]
    output: tuple[int, ...]

    def filters_out(self, filters: int) -> int:
        """Channels of the output of a cell with `filters` filters."""
        return filters * len(self.output)


class ReluConvNorm(nn.Sequential):
    """ReLU, 1x1 convolution, batch normalisation."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(channels, filters, 1, bias=False), nn.BatchNorm2d(filters))


class FactorisedReduction(nn.Module):
    """Halves height and width: two strided 1x1 convolutions, the second on the pixels that the first leaves out."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, filters // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, filters - filters // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(filters)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        height, width = x.shape[-2:]
        # An odd size has one pixel less between the pixels of the first half: a zero takes its place.
        shifted = F.pad(x, (-1, width % 2, -1, height % 2))
        result: Tensor = self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))
        return result


class Separable(nn.Sequential):
    """A depthwise-separable convolution applied twice: ReLU, depthwise, pointwise, normalisation; the first strided."""

    def __init__(self, channels: int, filters: int, kernel: int, stride: int) -> None:
        layers: list[nn.Module] = []
        for inputs, step in ((channels, stride), (filters, 1)):
            layers += [
                nn.ReLU(),
                nn.Conv2d(inputs, inputs, kernel, stride=step, padding=kernel // 2, groups=inputs, bias=False),
                nn.Conv2d(inputs, filters, 1, bias=False),
                nn.BatchNorm2d(filters),
            ]
        super().__init__(*layers)


class DilatedSeparable(nn.Sequential):
    """A depthwise-separable convolution of dilation 2, applied once."""

    def __init__(self, channels: int, filters: int, kernel: int, stride: int) -> None:
        padding = 2 * (kernel // 2)
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, stride, padding, dilation=2, groups=channels, bias=False),
            nn.Conv2d(channels, filters, 1, bias=False),
            nn.BatchNorm2d(filters),
        )


class Factorised7x7(nn.Sequential):
    """A 1x7 and a 7x1 convolution on a quarter of the filters, between two 1x1 convolutions."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        inner = filters // 4
        layers: list[nn.Module] = []
        for conv, width in (
            (nn.Conv2d(channels, inner, 1, bias=False), inner),
            (nn.Conv2d(inner, inner, (1, 7), stride=(1, stride), padding=(0, 3), bias=False), inner),
            (nn.Conv2d(inner, inner, (7, 1), stride=(stride, 1), padding=(3, 0), bias=False), inner),
            (nn.Conv2d(inner, filters, 1, bias=False), filters),
        ):
            layers += [nn.ReLU(), conv, nn.BatchNorm2d(width)]
        super().__init__(*layers)


def _pool(pool: nn.Module, channels: int, filters: int) -> nn.Module:
    """The pool; where channels and filters differ, a 1x1 convolution after it."""
    if channels == filters:
        return pool
    return nn.Sequential(pool, nn.Conv2d(channels, filters, 1, bias=False), nn.BatchNorm2d(filters))


def _average(channels: int, filters: int, stride: int) -> nn.Module:
    return _pool(nn.AvgPool2d(3, stride, padding=1, count_include_pad=False), channels, filters)


def _largest(channels: int, filters: int, stride: int) -> nn.Module:
    return _pool(nn.MaxPool2d(3, stride, padding=1), channels, filters)


def _identity(channels: int, filters: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorisedReduction(channels, filters)


# Each takes the channels of its input, the filters of its output and the stride.
OPERATIONS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "none": _identity,
    "avg_3x3": _average,
    "max_3x3": _largest,
    "sep_3x3": lambda channels, filters, stride: Separable(channels, filters, 3, stride),
    "sep_5x5": lambda channels, filters, stride: Separable(channels, filters, 5, stride),
    "sep_7x7": lambda channels, filters, stride: Separable(channels, filters, 7, stride),
    "dil_3x3": lambda channels, filters, stride: DilatedSeparable(channels, filters, 3, stride),
    "1x7_7x1": Factorised7x7,
}


class Cell(nn.Module):
    """Runs one cell. `forward(before, last)` takes the outputs of the last but one and of the last cell.

    `before_larger`: `before` is twice as high and wide as `last` and gets a factorised reduction. `before_raw`: state
    0 is `before` as it is, whatever its channels. A reduction halves height and width, in every operation that reads
    an input.
    """

    def __init__(
        self,
        spec: CellSpec,
        channels: tuple[int, int],
        filters: int,
        *,
        reduction: bool,
        before_larger: bool = False,
        before_raw: bool = False,
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.output = spec.output
        self.before: nn.Module
        if before_raw:
            self.before = nn.Identity()
        elif before_larger:
            self.before = FactorisedReduction(channels[0], filters)
        else:
            self.before = ReluConvNorm(channels[0], filters)
        self.last = ReluConvNorm(channels[1], filters)
        self.reads = [state for pair in spec.pairs for _, state in pair]
        self.operations = nn.ModuleList(
            OPERATIONS[name](
                channels[0] if before_raw and state == 0 else filters, filters, 2 if reduction and state < 2 else 1
            )
            for pair in spec.pairs
            for name, state in pair
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.before(before), self.last(last)]
        results = zip(self.operations, self.reads, strict=True)
        for (first, i), (second, j) in zip(results, results, strict=True):
            states.append(first(states[i]) + second(states[j]))
        return torch.cat([states[i] for i in self.output], dim=1)
