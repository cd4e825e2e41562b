"""oneDNN's convolutions and linear layers as tasks on a CPU, over weights that it lays out once and not in every call.

Each bound task lays its weight out before its first call. Instances over the same weight share what came of that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from nimble_jobs.engine.private import onednn
from nimble_jobs.engine.private.tensors import version
from nimble_jobs.schedule import Program, Task, View

CONVOLUTION, LINEAR = "nimble_jobs.onednn_convolution.default", "nimble_jobs.onednn_linear.default"
ADDED = "nimble_jobs.onednn_convolution_.add"  # to a tensor, in place
OPERATORS = (CONVOLUTION, ADDED, LINEAR)
_SETTINGS = 3  # position of a convolution's argument with its padding, stride, dilation and groups
NO_ACTIVATION: onednn.Activation = ("none", (), "")


class _Packed:
    """A weight as oneDNN lays it out. Holds the weight itself, too, so that no other can take its address."""

    def __init__(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        self.weight, self.packed = weight, packed


_PACKED: weakref.WeakValueDictionary[Hashable, _Packed] = weakref.WeakValueDictionary()


def caller(name: str) -> Callable[..., Any] | None:
    """What a bound task of that name calls; it keeps the packed weight. None for other tasks' names."""
    if name == CONVOLUTION:
        return _Convolution()
    if name == ADDED:
        return _Convolution().add
    return _Linear() if name == LINEAR else None


def packed_bytes(program: Program) -> int:
    """About how many bytes the packed weights of a program take: as many as the weights themselves, for each input
    size and settings that a convolution's weight is laid out for.
    """
    packed = {_layout(task) for task in program.tasks if task.op in OPERATORS}
    return sum(math.prod(weight.shape) * weight.itemsize for weight, _ in packed)


def _layout(task: Task) -> tuple[View, tuple[object, ...]]:
    """A task's weight, and what decides how it is laid out."""
    x, weight = task.args[:2]
    assert isinstance(x, View)
    assert isinstance(weight, View)
    return weight, () if task.op == LINEAR else (x.shape, task.args[_SETTINGS])


class _Task:
    """A bound task, which has its weight packed before its first call."""

    def __init__(self) -> None:
        self._weight: _Packed | None = None

    def _packed(
        self, weight: torch.Tensor, settings: tuple[object, ...], pack: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if self._weight is None:
            self._weight = _shared(weight, settings, pack)
        return self._weight.packed


class _Convolution(_Task):
    """Arguments: x [n, channels, ...], weight, bias or None, settings (padding, stride, dilation, groups), and then the
    activation and the strides of the result, or what it is added to.
    """

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: onednn.Settings,
        activation: Sequence[Any],
        strides: Sequence[int],
    ) -> torch.Tensor:
        packed = self._packed_for(x, weight, settings)
        return _laid_out(onednn.convolution(x, packed, bias, settings, _activation(activation)), strides)

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: onednn.Settings,
        other: torch.Tensor,
    ) -> None:
        packed = self._packed_for(x, weight, settings)
        onednn.add_convolution_(other, x, packed, bias, settings)

    def _packed_for(self, x: torch.Tensor, weight: torch.Tensor, settings: onednn.Settings) -> torch.Tensor:
        key = (*map(str, settings), *x.shape)
        return self._packed(weight, key, lambda: onednn.pack_convolution(weight, settings, x.shape))


class _Linear(_Task):
    """Arguments: x [rows, in], weight [in, out], bias or None, activation, strides of the result."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Sequence[Any],
        strides: Sequence[int],
    ) -> torch.Tensor:
        packed = self._packed(weight, (), lambda: onednn.pack_linear(weight.t().contiguous()))
        return _laid_out(onednn.linear(x, packed, bias, _activation(activation)), strides)


def _shared(weight: torch.Tensor, settings: tuple[object, ...], pack: Callable[[], torch.Tensor]) -> _Packed:
    key = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), settings)
    written = None if weight.is_inference() else version(weight)
    found = _PACKED.get((key, written))
    if found is None:
        with torch.no_grad():
            found = _PACKED[key, written] = _Packed(weight, pack())
    return found


def _activation(values: Sequence[Any]) -> onednn.Activation:
    name, numbers, algorithm = values
    return name, tuple(numbers), algorithm


def _laid_out(result: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The result with the strides that the program expects. Copies it unless only dimensions of size one differ."""
    if result.stride() == tuple(strides):
        return result
    if all(s == w for s, w, n in zip(result.stride(), strides, result.shape, strict=True) if n != 1):
        return result.as_strided(result.shape, list(strides))
    return torch.empty_strided(result.shape, list(strides), dtype=result.dtype).copy_(result)
