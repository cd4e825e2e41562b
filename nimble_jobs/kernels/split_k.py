"""Convolutions and matrix products whose sums are taken in several parts, at once, in a kernel of our own.

With few records a convolution of many channels has few output tiles, so most of a GPU waits while few blocks take long
sums. Here several blocks share each sum. They write their parts in fp32, and the compiler's kernel that follows adds
them up, in a fixed order, with whatever else it does: bias, activation, normalisation.

The same kernel takes the first convolution of most networks, over pictures of few channels, often in one part. There
it reads whole rows of the window, which lie side by side in memory.

Two operators compute the parts in torch. `epilogues` and `product_parts` put them into a compiler's graph where our
kernel is faster. In the recording our kernel takes their place.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import static_triton
from nimble_jobs.kernels.own_kernels import Launched, digest_of
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, capability_of, is_dense, lies
from nimble_jobs.schedule import Task, View

PREFIX = "triton.split_k"
TILES = {  # by name: blocks of pixels, features and channels, warps, stages; the first whose channels fit is used
    "64x64x64": (64, 64, 64, 4, 4),
    "64x64x32": (64, 64, 32, 4, 4),
    "64x64x16": (64, 64, 16, 4, 4),
}
_ROWS = "-rows"  # ends the name of a tile over whole rows of the window, for pictures of few channels
_WIDEST_ROW = 64  # values
_MOST_PIXELS = 1 << 15  # read by whole rows; with more, writing results in fp32 takes longer than that saves
MOST_PARTS = 18
_SHORTEST = 768  # values in a sum that is worth dividing
_SHORTEST_WINDOW = 128  # the same, for windows of several pixels: libraries take longer there
_BLOCKS = 132  # a block for each multiprocessor of an H100 or H200
_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "convolution_parts(Tensor x, Tensor weight, int[] stride, int[] padding, str way) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
_LIBRARY.define("product_parts(Tensor x, Tensor weight, str way) -> Tensor", tags=(torch.Tag.needs_exact_strides,))


def _convolution(x: Any, weight: Any, stride: Any, padding: Any, way: str) -> torch.Tensor:
    whole = functional.conv2d(x, weight, None, stride, padding).permute(0, 2, 3, 1)
    return _all_in_first(whole, parts_of(way))


def _product(x: torch.Tensor, weight: torch.Tensor, way: str) -> torch.Tensor:
    return _all_in_first(functional.linear(x, weight), parts_of(way))


def _all_in_first(whole: torch.Tensor, parts: int) -> torch.Tensor:
    found = torch.zeros((parts, *whole.shape), dtype=torch.float32, device=whole.device)
    found[0] = whole
    return found


for _key in ("CPU", "CUDA", "Meta"):
    _LIBRARY.impl("convolution_parts", _convolution, _key)
    _LIBRARY.impl("product_parts", _product, _key)

CONVOLUTION: OpOverload = getattr(torch.ops, _NAMESPACE).convolution_parts.default
PRODUCT: OpOverload = getattr(torch.ops, _NAMESPACE).product_parts.default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides its time. A product is a convolution of one pixel, over a picture of one column."""

    dtype: str  # torch's name without the prefix
    images: int
    channels: int
    height: int
    width: int
    features: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        height, width = (
            (size + 2 * padding - kernel) // stride + 1
            for size, padding, kernel, stride in zip(
                (self.height, self.width), self.padding, self.kernel, self.stride, strict=True
            )
        )
        return height, width

    @property
    def pixels(self) -> int:
        """Of the results of all images."""
        return self.images * math.prod(self.out)

    @property
    def ways(self) -> tuple[str, ...]:
        """A tile and a number of parts that are worth trying; none if our kernel cannot compute it, or need not."""
        sizes = (self.images, self.channels, self.features, *self.out)
        if self.dtype not in ("float16", "bfloat16") or min(sizes) < 1 or self.features % 8:
            return ()
        if (
            max(self.images * self.height * self.width * self.channels, MOST_PARTS * self.pixels * self.features)
            >= MOST
        ):
            return ()
        taps, row = math.prod(self.kernel), self.kernel[1] * self.channels
        tile = next((name for name, (_, _, block, _, _) in TILES.items() if self.channels % block == 0), None)
        if tile is None and taps > 1 and row <= _WIDEST_ROW and self.pixels <= _MOST_PIXELS:
            tile = f"64x64x{max(16, 1 << (row - 1).bit_length())}{_ROWS}"
        elif tile is None or taps * self.channels < (_SHORTEST if taps == 1 else _SHORTEST_WINDOW):
            return ()
        pixels, features = _tile(tile)[:2]
        tiles = -(-self.pixels // pixels) * -(-self.features // features)
        steps = self.steps(tile)
        fewest = 1 if tile.endswith(_ROWS) else 2
        parts = [n for n in range(fewest, min(steps, MOST_PARTS) + 1) if steps % n == 0]
        if (fewest > 1 and fewest * tiles > _BLOCKS) or not parts:
            return ()
        best = min(parts, key=lambda n: abs(math.log(n * tiles / _BLOCKS)))
        return (f"{tile}/{best}",)

    def steps(self, tile: str) -> int:
        """Blocks of channels, or rows of the window, in a sum."""
        if tile.endswith(_ROWS):
            return self.kernel[0]
        return math.prod(self.kernel) * self.channels // _tile(tile)[2]

    def name(self, way: str) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        picture = f"{self.images}x{self.channels}x{self.height}x{self.width}x{self.features}"
        window = "-".join("x".join(map(str, pair)) for pair in (self.kernel, self.stride, self.padding))
        return f"{PREFIX}.{self.dtype}.{picture}.{window}.{way.replace('/', '-')}"


def parts_of(way: str) -> int:
    """The number of parts of a way."""
    return int(way.rpartition("/")[2])


def _tile(name: str) -> tuple[int, int, int, int, int]:
    return TILES[name.removesuffix(_ROWS)]


def code_digest() -> str:
    """Of the source of our kernel and of its tiles."""
    return digest_of("split_k", "split_k_triton")


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of either operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    shape = shape_of(task)
    if shape is None:
        return None
    return Launched(kernel=compiled(shape, str(task.args[-1]), capability_of(device)), given=task.args[:2])


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
        )
    return shape if task.args[-1] in shape.ways else None


def product_shape(dtype: str, x: tuple[int, ...], weight: tuple[int, ...]) -> Shape:
    """Of x [..., inputs] and weight [features, inputs]."""
    return Shape(dtype=dtype, images=1, channels=weight[1], height=math.prod(x[:-1]), width=1, features=weight[0])


@functools.lru_cache(maxsize=1024)
def compiled(shape: Shape, way: str, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    from nimble_jobs.kernels import split_k_triton

    tile, _, parts = way.rpartition("/")
    pixels, features, _, warps, stages = _tile(tile)
    grid = (-(-shape.pixels // pixels), -(-shape.features // features), int(parts))
    kind = TYPES[shape.dtype]
    return static_triton.compiled(
        split_k_triton.split_k,
        Launch(name=shape.name(way), grid=grid, warps=warps, stages=stages),
        capability,
        pointers={"x": kind, "weight": kind, "out": "fp32"},
        constants=constants(shape, way),
    )


def constants(shape: Shape, way: str) -> dict[str, int]:
    """Of the kernel."""
    tile = way.rpartition("/")[0]
    pixels, features, channels, _, _ = _tile(tile)
    return {
        "PIXELS": shape.pixels,
        "OUT_HEIGHT": shape.out[0],
        "OUT_WIDTH": shape.out[1],
        "HEIGHT": shape.height,
        "WIDTH": shape.width,
        "CHANNELS": shape.channels,
        "FEATURES": shape.features,
        "KERNEL_HEIGHT": shape.kernel[0],
        "KERNEL_WIDTH": shape.kernel[1],
        "STRIDE_Y": shape.stride[0],
        "STRIDE_X": shape.stride[1],
        "PADDING_Y": shape.padding[0],
        "PADDING_X": shape.padding[1],
        "STEPS": shape.steps(tile) // parts_of(way),
        "PIXEL_BLOCK": pixels,
        "FEATURE_BLOCK": features,
        "CHANNEL_BLOCK": channels,
        "ROWS": int(tile.endswith(_ROWS)),
    }


def _pair(value: Any) -> tuple[int, int]:
    first, last = (*value, *value)[:2]
    return int(first), int(last)
