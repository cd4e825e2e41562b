"""A pointwise convolution, of single pixels, with bias, activation or a sum in one kernel of our own.

Libraries compute a product with bias and ReLU in one kernel, but not with ReLU6, SiLU or Hardswish, as MobileNets and
EfficientNets have them, nor with bias and the other operand of a residual sum.

An operator computes it in torch. A pass over a compiler's graph (`pointwise_pass`) puts it there where our kernel is
faster than the library's product with a second kernel; another (`epilogues`) compares it with all that libraries have
for plain convolutions, and for those with a bias, ReLU, or a sum and ReLU, also with a stride. In the recording our
kernel takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from nimble_jobs.engine.fused_convolutions import convolved_like
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import static_triton
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.ahead import Compiles
from nimble_jobs.kernels.own_kernels import Launched, digest_of, tile_in
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, aligned, capability_of, lies
from nimble_jobs.schedule import Program, Task, View

PREFIX = "triton.pointwise"
_UNIT = 8  # values of 16 bits that are read at once at most
_LEAST = 2  # values read at once that are worth trying
MOST_PIXELS = 1 << 15  # beyond that the product itself is what takes long
TILES = {  # by name: blocks of pixels, features and inputs, warps, stages
    "128x64x32": (128, 64, 32, 4, 3),
    "64x32x32": (64, 32, 32, 4, 3),
    "32x32x64": (32, 32, 64, 4, 4),
    "16x32x64": (16, 32, 64, 2, 4),
    "64x64x64": (64, 64, 64, 4, 3),
}
_BESIDE_OTHERS = "64x64x64"  # reads less, but with few blocks
_TRIED = 2  # tiles
_BLOCKS = 200  # that keep a GPU of about 132 multiprocessors busy
_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "pointwise(Tensor x, Tensor weight, Tensor? bias, Tensor? other, str activation, str tile, int stride=1) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def _computed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor | None,
    activation: str,
    tile: str,
    stride: int = 1,
) -> torch.Tensor:
    found = functional.conv2d(x, weight, bias, stride)
    found = found if other is None else found + other
    found = ACTIVATIONS[activation](found) if activation else found
    return found.contiguous(memory_format=torch.channels_last)


def _shape_of(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, other: Any, activation: str, tile: str, stride: int = 1
) -> torch.Tensor:
    return convolved_like(x, weight, (stride, stride), (0, 0), (1, 1))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("pointwise", _computed, _key)
_LIBRARY.impl("pointwise", _shape_of, "Meta")

OPERATOR: OpOverload = getattr(torch.ops, _NAMESPACE).pointwise.default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides its time."""

    dtype: str  # torch's name without the prefix
    pixels: int  # of all results
    inputs: int
    features: int
    added: bool  # whether there is another operand, of the result's shape
    activation: str  # one of ACTIVATIONS, or empty
    biased: bool = True
    stride: int = 1
    picture: tuple[int, int] = (0, 0)  # height and width of the images, with a stride above 1

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        strided = f", stride {self.stride}" if self.stride > 1 else ""
        steps = ("bias" if self.biased else "", "a sum" if self.added else "", self.activation)
        then = " and ".join(filter(None, steps))
        return (
            f"pointwise convolution, {self.dtype}, {self.pixels} pixels{strided}, {self.inputs} to {self.features}"
            f"{f', then {then}' if then else ''}"
        )

    @property
    def unit(self) -> int:
        """How many values are read at once."""
        return math.gcd(self.inputs, self.features, _UNIT)

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that are worth trying; none if our kernel cannot compute this shape, or need not."""
        sizes = sorted((self.pixels, self.inputs, self.features))
        if self.dtype not in ("float16", "bfloat16") or sizes[0] < 1 or self.pixels > MOST_PIXELS:
            return ()
        read = self.stride**2 * self.pixels * self.inputs  # elements at most
        if self.unit < _LEAST or max(sizes[1] * sizes[2], read) >= MOST:
            return ()

        return self._best(_TRIED, _BLOCKS, [tile for tile in TILES if tile != _BESIDE_OTHERS])

    def tiles_beside(self, copies: int) -> tuple[str, ...]:
        """The same if so many copies run side by side. Each has a share of the GPU, so fewer blocks are enough, and
        larger ones read the same values less often.
        """
        if copies == 1 or not self.tiles:
            return self.tiles
        return self._best(_TRIED + 1, _BLOCKS / copies, TILES)

    def _best(self, count: int, blocks: float, tiles: Iterable[str]) -> tuple[str, ...]:
        """The tiles whose number of blocks is nearest to `blocks`."""

        def fit(tile: str) -> tuple[float, int]:
            pixels, features, *_ = TILES[tile]
            return abs(math.log(math.prod(self.grid(tile)) / blocks)), pixels * features

        return tuple(sorted(tiles, key=fit)[:count])

    def grid(self, tile: str) -> tuple[int, int, int]:
        """Number of blocks in each dimension."""
        pixels, features, *_ = TILES[tile]
        return -(-self.pixels // pixels), -(-self.features // features), 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The kernel's arguments after its tensors."""
        return self.pixels, self.inputs // self.unit, self.features // self.unit, *self.picture

    def name(self, tile: str) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        kinds = ("" if self.biased else "unbiased", "sum" if self.added else "", self.activation)
        then = "-".join(filter(None, kinds))
        strided = f"x{self.stride}x{'x'.join(map(str, self.picture))}" if self.stride > 1 else ""
        return f"{PREFIX}.{self.dtype}.{self.pixels}x{self.inputs}x{self.features}{strided}.{then}.{tile}"


Wanted = Callable[[Shape, torch.device], str | None]  # with which tile our kernel is to compute a shape; None: not


def wanted_as_in(program: Program) -> Wanted:
    """As in an earlier recording of the same module."""
    return tile_in({task.op for task in program.tasks}, TILES)


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of the operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    shape = shape_of(task)
    if shape is None:
        return None
    x, weight, bias, other, _, tile, *_ = task.args
    kernel = compiled(shape, str(tile), capability_of(device))
    return Launched(kernel=kernel, given=tensors_of(x, weight, bias, other), sizes=shape.sizes)


def tensors_of(x: Any, weight: Any, bias: Any, other: Any) -> tuple[Any, ...]:
    """What the kernel is given before the output: others stand in for what it does not read."""
    return x, weight, weight if bias is None else bias, x if other is None else other


def shape_of(task: Task) -> Shape | None:
    """What a task of the operator computes, if our kernel can; None for any other task."""
    if task.op != str(OPERATOR):
        return None
    x, weight, bias, other, activation, tile, *strides = task.args
    stride, out = strides[0] if strides else 1, task.outputs
    if not (isinstance(x, View) and isinstance(weight, View) and isinstance(out, View) and isinstance(stride, int)):
        return None
    images = [x, out, *([other] if isinstance(other, View) else [])]
    if not all(lies(each, channels_last=True) for each in images) or not lies(weight, channels_last=False):
        return None
    biases = [bias] if isinstance(bias, View) else []
    same = len({each.dtype for each in (*images, weight, *biases)}) == 1
    if not (same and all(each.stride == (1,) and aligned(each) for each in biases)):
        return None
    shape = Shape(
        dtype=x.dtype,
        pixels=out.shape[0] * out.shape[2] * out.shape[3],
        inputs=x.shape[1],
        features=weight.shape[0],
        added=other is not None,
        activation=str(activation),
        biased=bias is not None,
        stride=stride,
        picture=(x.shape[2], x.shape[3]) if stride > 1 else (0, 0),
    )
    return shape if tile in TILES and shape.tiles else None


def code_digest() -> str:
    """SHA-256 of the code that decides how long our kernel takes."""
    return digest_of("pointwise", "pointwise_triton", "activations_triton")


@Compiles
def compiled(shape: Shape, tile: str, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    from nimble_jobs.kernels import pointwise_triton

    _, _, _, warps, stages = TILES[tile]
    return static_triton.compiled(
        pointwise_triton.pointwise,
        Launch(name=shape.name(tile), grid=shape.grid(tile), warps=warps, stages=stages),
        capability,
        pointers=dict.fromkeys(("x", "weight", "bias", "other", "out"), TYPES[shape.dtype]),
        sizes=pointwise_triton.SIZES,
        constants=constants(shape, tile),
    )


def constants(shape: Shape, tile: str) -> dict[str, int]:
    """Of the kernel."""
    pixels, features, inputs, _, _ = TILES[tile]
    return {
        "UNIT": shape.unit,
        "PIXEL_BLOCK": pixels,
        "FEATURE_BLOCK": features,
        "INPUT_BLOCK": inputs,
        "STRIDE": shape.stride,
        "BIASED": int(shape.biased),
        "ADDED": int(shape.added),
        "ACTIVATION": list(ACTIVATIONS).index(shape.activation) if shape.activation else -1,
    }
