"""A depthwise convolution with its bias and activation in one kernel of our own.

An operator computes it in torch. A pass over a compiler's graph (`depthwise_pass`) puts it there where our kernel is
faster than the library's with a second kernel for the activation. In the recording our kernel takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from nimble_jobs.engine.fused_convolutions import convolved_like
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import depthwise
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.depthwise import TILES
from nimble_jobs.kernels.own_kernels import Launched, tile_in
from nimble_jobs.kernels.static_triton import aligned, capability_of
from nimble_jobs.schedule import Program, Task, View

_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "depthwise_activated(Tensor x, Tensor weight, Tensor bias, int stride, int padding, int dilation, str activation,"
    " str tile='') -> Tensor",  # programs that were stored without a tile can still be run
    tags=(torch.Tag.needs_exact_strides,),
)


def _computed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    stride: int,
    padding: int,
    dilation: int,
    activation: str,
    tile: str = "",
) -> torch.Tensor:
    found = functional.conv2d(x, weight, bias, stride, padding, dilation, x.shape[1])
    return ACTIVATIONS[activation](found).contiguous(memory_format=torch.channels_last)


def _shape_of(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: int, padding: int, dilation: int, *_: Any
) -> torch.Tensor:
    return convolved_like(x, weight, (stride,) * 2, (padding,) * 2, (dilation,) * 2)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("depthwise_activated", _computed, _key)
_LIBRARY.impl("depthwise_activated", _shape_of, "Meta")

OPERATOR: OpOverload = getattr(torch.ops, _NAMESPACE).depthwise_activated.default


@dataclass(frozen=True, kw_only=True)
class Activated:
    """Everything that decides time and kernel."""

    shape: depthwise.Shape  # of a convolution over channels-last images
    activation: str  # one of ACTIVATIONS

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that are worth trying."""
        return self.shape.tiles

    def name(self, tile: str) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        return self.shape.name(tile, self.activation)

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        return f"{self.shape.words}, then bias and {self.activation}"


Wanted = Callable[[Activated, torch.device], str | None]  # with which tile our kernel is to compute one; None: not


def wanted_as_in(program: Program) -> Wanted:
    """As in an earlier recording of the same module."""
    return tile_in({task.op for task in program.tasks}, TILES)


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of the operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    one = activated_of(task)
    if one is None:
        return None
    tile = str(task.args[-1])
    return Launched(kernel=compiled(one, tile, capability_of(device)), given=task.args[:3], sizes=one.shape.sizes(tile))


def activated_of(task: Task) -> Activated | None:
    """What a task of the operator computes, if our kernel can; None for any other task."""
    if task.op != str(OPERATOR) or task.args[-1] not in TILES:
        return None
    x, weight, bias, *settings, activation, _ = task.args
    out = task.outputs
    assert isinstance(activation, str)
    if not all(isinstance(each, View) for each in (x, weight, bias, out)):
        return None
    assert isinstance(x, View) and isinstance(weight, View) and isinstance(bias, View) and isinstance(out, View)  # noqa: PT018
    shape = depthwise.shape_between(x, weight, out, [int(s) for s in settings if isinstance(s, int)])
    dense = bias.stride == (1,) and aligned(bias) and bias.dtype == x.dtype
    return Activated(shape=shape, activation=activation) if shape and shape.channels_last and dense else None


def compiled(one: Activated, tile: str, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    return depthwise.compiled(one.shape, tile, capability, one.activation)
