"""A depthwise-separable convolution in one kernel of our own: over a window in each channel, then over all channels.

Libraries need a kernel for each of the two, and memory between them. With few pixels a second kernel takes longer to
start than to compute. The networks of NASNet and its kin consist of such convolutions; a MobileNetV2's block ends with
one.

An operator computes it in torch. A pass over a compiler's graph (`separable_pass`) puts it there where our kernel is
faster than the fastest two. In the recording our kernel takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from nimble_jobs.engine.fused_convolutions import convolved_like
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import depthwise, static_triton
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.ahead import Compiles
from nimble_jobs.kernels.own_kernels import Launched, digest_of, tile_in
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, aligned, capability_of, lies
from nimble_jobs.schedule import Program, Task, View

PREFIX = "triton.separable"
MOST_PLACES = 1 << 15  # beyond that the kernels themselves are what takes long
TILES = {  # by name: blocks of places, features and inputs, warps
    "16x32x64": (16, 32, 64, 4),
    "16x64x64": (16, 64, 64, 4),
    "32x64x64": (32, 64, 64, 8),
    "16x32x128": (16, 32, 128, 8),
    "16x64x128": (16, 64, 128, 8),
    "16x128x128": (16, 128, 128, 8),
}
_TRIED = 3  # tiles
_BLOCKS = 132  # that keep a GPU of as many multiprocessors busy
_TIMES = 4  # a window may be summed for so many blocks of features
_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "separable(Tensor x, Tensor depth_weight, Tensor? depth_bias, Tensor weight, Tensor bias, Tensor? other,"
    " int stride, int padding, int dilation, bool rectified, str between, str activation, str tile) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def _computed(
    x: torch.Tensor,
    depth_weight: torch.Tensor,
    depth_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None,
    stride: int,
    padding: int,
    dilation: int,
    rectified: bool,
    between: str,
    activation: str,
    tile: str,
) -> torch.Tensor:
    found = functional.relu(x) if rectified else x
    found = functional.conv2d(found, depth_weight, depth_bias, stride, padding, dilation, x.shape[1])
    found = ACTIVATIONS[between](found) if between else found
    found = functional.conv2d(found, weight, bias)
    found = found if other is None else found + other
    found = ACTIVATIONS[activation](found) if activation else found
    return found.contiguous(memory_format=torch.channels_last)


def _shape_of(
    x: torch.Tensor, depth_weight: torch.Tensor, depth_bias: Any, weight: torch.Tensor, *rest: Any
) -> torch.Tensor:
    stride, padding, dilation = rest[2:5]
    middle = convolved_like(x, depth_weight, (stride,) * 2, (padding,) * 2, (dilation,) * 2)
    return convolved_like(middle, weight, (1, 1), (0, 0), (1, 1))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("separable", _computed, _key)
_LIBRARY.impl("separable", _shape_of, "Meta")

OPERATOR: OpOverload = getattr(torch.ops, _NAMESPACE).separable.default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides its time."""

    depth: depthwise.Shape  # of the convolution over a window, over channels-last images
    features: int
    rectified: bool  # whether it is over the ReLU of its input
    depth_bias: bool
    between: str  # one of ACTIVATIONS, or empty
    added: bool  # whether there is another operand, of the result's shape
    activation: str  # one of ACTIVATIONS, or empty

    @property
    def steps(self) -> tuple[str, ...]:
        """What it computes, in order."""
        before = ["relu"] if self.rectified else []
        between = [*(["bias"] if self.depth_bias else []), *([self.between] if self.between else [])]
        after = [*(["sum"] if self.added else []), *([self.activation] if self.activation else [])]
        return (*before, "window", *between, "product", *after)

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        return f"{self.depth.words}, then a product to {self.features} features: {', '.join(self.steps)}"

    @property
    def unit(self) -> int:
        """How many values of 16 bits are read at once."""
        return math.gcd(self.depth.channels, self.features, 8)

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that are worth trying; none if our kernel cannot compute this shape, or need not."""
        depth = self.depth
        if depth.dtype not in ("float16", "bfloat16") or not depth.channels_last or depth.places > MOST_PLACES:
            return ()
        if self.unit < 4 or max(depth.places, depth.channels) * self.features >= MOST:
            return ()

        def fit(tile: str) -> tuple[bool, float]:
            _, _, inputs, _ = TILES[tile]
            return (inputs > 64) != (depth.channels > 64), abs(math.log(math.prod(self.grid(tile)) / _BLOCKS))

        possible = [tile for tile in TILES if self.grid(tile)[1] <= _TIMES]
        return tuple(sorted(possible, key=fit)[:_TRIED])

    def grid(self, tile: str) -> tuple[int, int, int]:
        """Number of blocks in each dimension."""
        places, features, *_ = TILES[tile]
        return -(-self.depth.places // places), -(-self.features // features), 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The kernel's arguments after its tensors."""
        return self.depth.channels // self.unit, self.features // self.unit, *self.depth.geometry

    def name(self, tile: str) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        depth = self.depth
        sizes = "x".join(map(str, (depth.channels, self.features, *self.sizes[2:])))
        return f"{PREFIX}{depth.kernel}.{depth.dtype}.{sizes}.{'-'.join(self.steps)}.{tile}"


Wanted = Callable[[Shape, torch.device], str | None]  # with which tile our kernel is to compute a shape; None: not


def wanted_as_in(program: Program) -> Wanted:
    """As in an earlier recording of the same module."""
    return tile_in({task.op for task in program.tasks})


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of the operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    shape = shape_of(task)
    if shape is None:
        return None
    x, depth_weight, depth_bias, weight, bias, other, *_, tile = task.args
    given = (
        x,
        depth_weight,
        bias if depth_bias is None else depth_bias,
        weight,
        bias,
        x if other is None else other,
    )
    kernel = compiled(shape, str(tile), capability_of(device))
    return Launched(kernel=kernel, given=given, sizes=shape.sizes)


def tensors_of(x: Any, depth_weight: Any, depth_bias: Any, weight: Any, bias: Any, other: Any) -> tuple[Any, ...]:
    """The kernel's tensors before its output, of the operator's arguments. It does not read what stands for None."""
    return x, depth_weight, bias if depth_bias is None else depth_bias, weight, bias, x if other is None else other


def shape_of(task: Task) -> Shape | None:
    """What a task of the operator computes, if our kernel can; None for any other task."""
    if task.op != str(OPERATOR):
        return None
    x, depth_weight, depth_bias, weight, bias, other, *window, rectified, between, then, tile = task.args
    out = task.outputs
    if not all(isinstance(each, View) for each in (x, depth_weight, weight, bias, out)):
        return None
    assert isinstance(x, View) and isinstance(depth_weight, View) and isinstance(weight, View)  # noqa: PT018
    assert isinstance(out, View)
    biases = [each for each in (bias, depth_bias) if isinstance(each, View)]
    results = [out, *([other] if isinstance(other, View) else [])]
    if not all(lies(each, channels_last=True) for each in results) or not lies(weight, channels_last=False):
        return None
    same = len({each.dtype for each in (x, weight, *results, *biases)}) == 1
    if not same or not all(each.stride == (1,) and aligned(each) for each in biases):
        return None
    images, _, height, width = out.shape
    channels = x.shape[1]
    if weight.shape[1:] != (channels, 1, 1):
        return None
    middle = replace(  # what a kernel alone would write
        out,
        offset=0,
        shape=(images, channels, height, width),
        stride=(height * width * channels, 1, width * channels, channels),
    )
    depth = depthwise.shape_between(x, depth_weight, middle, [each for each in window if isinstance(each, int)])
    if depth is None:
        return None
    shape = Shape(
        depth=depth,
        features=weight.shape[0],
        rectified=bool(rectified),
        depth_bias=depth_bias is not None,
        between=str(between),
        added=other is not None,
        activation=str(then),
    )
    return shape if tile in shape.tiles else None


def code_digest() -> str:
    """SHA-256 of the code that decides how long our kernel takes."""
    return digest_of("separable", "separable_triton", "activations_triton")


@Compiles
def compiled(shape: Shape, tile: str, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    from nimble_jobs.kernels import separable_triton

    *_, warps = TILES[tile]
    names = ("x", "depth_weight", "depth_bias", "weight", "bias", "other", "out")
    return static_triton.compiled(
        separable_triton.separable,
        Launch(name=shape.name(tile), grid=shape.grid(tile), warps=warps, stages=1),
        capability,
        pointers=dict.fromkeys(names, TYPES[shape.depth.dtype]),
        sizes=separable_triton.SIZES,
        constants=constants(shape, tile),
    )


def constants(shape: Shape, tile: str) -> dict[str, int]:
    """Of the kernel."""
    places, features, inputs, _ = TILES[tile]

    def number(activation: str) -> int:
        return list(ACTIVATIONS).index(activation) if activation else -1

    return {
        "KERNEL": shape.depth.kernel,
        "UNIT": shape.unit,
        "PLACE_BLOCK": places,
        "FEATURE_BLOCK": features,
        "INPUT_BLOCK": inputs,
        "RECTIFIED": int(shape.rectified),
        "DEPTH_BIAS": int(shape.depth_bias),
        "BETWEEN": number(shape.between),
        "ADDED": int(shape.added),
        "ACTIVATION": number(shape.activation),
    }
