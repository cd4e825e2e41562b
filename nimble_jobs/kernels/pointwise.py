"""A pointwise convolution, of single pixels, with bias and activation or a sum in one kernel of our own.

Libraries compute a product with bias and ReLU in one kernel, but not with ReLU6, SiLU or Hardswish, as MobileNets and
EfficientNets have them, nor with bias and the other operand of a residual sum.

An operator computes it in torch. A pass over a compiler's graph (`pointwise_pass`) puts it there where our kernel is
faster than the library's product with a second kernel; another (`epilogues`) compares it with all that libraries have
for a bias alone, for ReLU, and for a sum with ReLU. In the recording our kernel takes its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import static_triton
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.own_kernels import Launched, digest_of, tile_in
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, aligned, capability_of, lies
from nimble_jobs.schedule import Program, Task, View

PREFIX = "triton.pointwise"
UNIT = 8  # values of 16 bits that are read at once
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
    "pointwise(Tensor x, Tensor weight, Tensor bias, Tensor? other, str activation, str tile) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def _computed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, other: torch.Tensor | None, activation: str, tile: str
) -> torch.Tensor:
    found = functional.conv2d(x, weight, bias)
    found = found if other is None else found + other
    found = ACTIVATIONS[activation](found) if activation else found
    return found.contiguous(memory_format=torch.channels_last)


for _key in ("CPU", "CUDA", "Meta"):
    _LIBRARY.impl("pointwise", _computed, _key)

OPERATOR: OpOverload = getattr(torch.ops, _NAMESPACE).pointwise.default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides its time."""

    dtype: str  # torch's name without the prefix
    pixels: int  # of all images
    inputs: int
    features: int
    added: bool  # whether there is another operand, of the result's shape
    activation: str  # one of ACTIVATIONS, or empty

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        then = [*(["a sum"] if self.added else []), *([self.activation] if self.activation else [])]
        return (
            f"pointwise convolution, {self.dtype}, {self.pixels} pixels, {self.inputs} to {self.features}, then bias"
            f"{''.join(f' and {each}' for each in then)}"
        )

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that are worth trying; none if our kernel cannot compute this shape, or need not."""
        sizes = sorted((self.pixels, self.inputs, self.features))
        if self.dtype not in ("float16", "bfloat16") or sizes[0] < 1 or self.pixels > MOST_PIXELS:
            return ()
        if self.inputs % UNIT or self.features % UNIT or sizes[1] * sizes[2] >= MOST:  # of a tensor, also the weight
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
    def sizes(self) -> tuple[int, int, int]:
        """The kernel's arguments after its tensors."""
        return self.pixels, self.inputs // UNIT, self.features // UNIT

    def name(self, tile: str) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        then = "-".join([*(["sum"] if self.added else []), *([self.activation] if self.activation else [])])
        return f"{PREFIX}.{self.dtype}.{self.pixels}x{self.inputs}x{self.features}.{then}.{tile}"


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
    x, weight, bias, other, _, tile = task.args
    kernel = compiled(shape, str(tile), capability_of(device))
    return Launched(kernel=kernel, given=(x, weight, bias, x if other is None else other), sizes=shape.sizes)


def shape_of(task: Task) -> Shape | None:
    """What a task of the operator computes, if our kernel can; None for any other task."""
    if task.op != str(OPERATOR):
        return None
    x, weight, bias, other, activation, tile = task.args
    out = task.outputs
    if not all(isinstance(each, View) for each in (x, weight, bias, out)):
        return None
    assert isinstance(x, View) and isinstance(weight, View) and isinstance(bias, View) and isinstance(out, View)  # noqa: PT018
    images = [x, out, *([other] if isinstance(other, View) else [])]
    if not all(lies(each, channels_last=True) for each in images) or not lies(weight, channels_last=False):
        return None
    same = len({each.dtype for each in (*images, weight, bias)}) == 1
    if not (same and bias.stride == (1,) and aligned(bias)):
        return None
    shape = Shape(
        dtype=x.dtype,
        pixels=x.shape[0] * x.shape[2] * x.shape[3],
        inputs=x.shape[1],
        features=weight.shape[0],
        added=other is not None,
        activation=str(activation),
    )
    return shape if tile in TILES and shape.tiles else None


def code_digest() -> str:
    """SHA-256 of the code that decides how long our kernel takes."""
    return digest_of("pointwise", "pointwise_triton", "activations_triton")


@functools.lru_cache(maxsize=1024)
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
        "UNIT": UNIT,
        "PIXEL_BLOCK": pixels,
        "FEATURE_BLOCK": features,
        "INPUT_BLOCK": inputs,
        "ADDED": int(shape.added),
        "ACTIVATION": list(ACTIVATIONS).index(shape.activation) if shape.activation else -1,
    }
