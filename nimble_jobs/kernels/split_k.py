"""Convolutions and matrix products whose sums are taken in several parts, at once, in a kernel of our own.

With few records a convolution of many channels has few output tiles, so most of a GPU waits while few blocks take long
sums. Here several blocks share each sum. They write their parts in fp32, and the compiler's kernel that follows adds
them up, in a fixed order, with whatever else it does: bias, activation, normalisation.

The same kernel takes the first convolution of most networks, over pictures of few channels, often in one part. There
it reads whole rows of the window, which lie side by side in memory. Dilated convolutions have a kernel of their own,
which leaves out what lies outside of the picture; `bands` says how.

Two operators compute the parts in torch. `epilogues` and `product_parts` put them into a compiler's graph where our
kernel is faster. In the recording our kernel takes their place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from nimble_jobs.engine.fused_convolutions import convolved_like
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import static_triton
from nimble_jobs.kernels.ahead import Compiles
from nimble_jobs.kernels.own_kernels import Launched, digest_of
from nimble_jobs.kernels.split_k_shape import Shape, constants, parts_of, product_shape, tile_of
from nimble_jobs.kernels.static_triton import TYPES, Launch, capability_of, is_dense, lies
from nimble_jobs.schedule import Task, View

_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "convolution_parts(Tensor x, Tensor weight, int[] stride, int[] padding, str way, int[2] dilation=1) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
_LIBRARY.define("product_parts(Tensor x, Tensor weight, str way) -> Tensor", tags=(torch.Tag.needs_exact_strides,))


def _convolution(x: Any, weight: Any, stride: Any, padding: Any, way: str, dilation: Any = 1) -> torch.Tensor:
    whole = functional.conv2d(x, weight, None, stride, padding, dilation).permute(0, 2, 3, 1)
    return _all_in_first(whole, parts_of(way))


def _product(x: torch.Tensor, weight: torch.Tensor, way: str) -> torch.Tensor:
    return _all_in_first(functional.linear(x, weight), parts_of(way))


def _all_in_first(whole: torch.Tensor, parts: int) -> torch.Tensor:
    found = torch.zeros((parts, *whole.shape), dtype=torch.float32, device=whole.device)
    found[0] = whole
    return found


def _convolution_shape(
    x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, way: str, dilation: Any = (1, 1)
) -> torch.Tensor:
    images, features, *places = convolved_like(x, weight, stride, padding, dilation).shape
    return x.new_empty((parts_of(way), images, *places, features), dtype=torch.float32)


def _product_shape(x: torch.Tensor, weight: torch.Tensor, way: str) -> torch.Tensor:
    return x.new_empty((parts_of(way), *x.shape[:-1], weight.shape[0]), dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("convolution_parts", _convolution, _key)
    _LIBRARY.impl("product_parts", _product, _key)
_LIBRARY.impl("convolution_parts", _convolution_shape, "Meta")
_LIBRARY.impl("product_parts", _product_shape, "Meta")

CONVOLUTION: OpOverload = getattr(torch.ops, _NAMESPACE).convolution_parts.default
PRODUCT: OpOverload = getattr(torch.ops, _NAMESPACE).product_parts.default


def code_digest() -> str:
    """Of the source of our kernels and of their tiles."""
    return digest_of("bands", "dilated_triton", "split_k", "split_k_shape", "split_k_triton")


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of either operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    shape = shape_of(task)
    if shape is None:
        return None
    return Launched(kernel=compiled(shape, _way_of(task), capability_of(device)), given=task.args[:2])


def shape_of(task: Task) -> Shape | None:
    """What a task of the two operators computes, if our kernel can; None for any other task."""
    if task.op not in (str(CONVOLUTION), str(PRODUCT)):
        return None
    x, weight, out = task.args[0], task.args[1], task.outputs
    if not (isinstance(x, View) and isinstance(weight, View) and isinstance(out, View)) or not is_dense(out):
        return None
    if x.dtype != weight.dtype:
        return None
    if task.op == str(PRODUCT):
        if not (is_dense(x) and is_dense(weight)):
            return None
        shape = product_shape(x.dtype, x.shape, weight.shape)
    else:
        if not (lies(x, channels_last=True) and lies(weight, channels_last=True)):
            return None
        stride, padding = (_pair(value) for value in task.args[2:4])
        images, channels, height, width = x.shape
        shape = Shape(
            dtype=x.dtype,
            images=images,
            channels=channels,
            height=height,
            width=width,
            features=weight.shape[0],
            kernel=(weight.shape[2], weight.shape[3]),
            stride=stride,
            padding=padding,
            dilation=_pair(task.args[5] if len(task.args) > 5 else 1),  # a default is left out
        )
    return shape if _way_of(task) in shape.ways else None


def _way_of(task: Task) -> str:
    return str(task.args[4 if task.op == str(CONVOLUTION) else 2])


@Compiles
def compiled(shape: Shape, way: str, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    from nimble_jobs.kernels import dilated_triton, split_k_triton

    tile, _, parts = way.rpartition("/")
    _, _, _, warps, stages = tile_of(tile)
    kind = TYPES[shape.dtype]
    return static_triton.compiled(
        dilated_triton.dilated if shape.dilated else split_k_triton.split_k,
        Launch(name=shape.name(way), grid=(*shape.grid(tile), int(parts)), warps=warps, stages=stages),
        capability,
        pointers={"x": kind, "weight": kind, "out": "fp32"},
        constants=constants(shape, way),
    )


def _pair(value: Any) -> tuple[int, int]:
    first, last = (value, value) if isinstance(value, int) else (*value, *value)[:2]
    return int(first), int(last)
