"""A pass over the graph that a compiler is given: computes convolutions whose windows lie side by side, such as those
that cut a picture into patches, as matrix products, where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph
from torch.nn import functional

from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import choices
from nimble_jobs.kernels.fx_nodes import fixed_example, same_strides
from nimble_jobs.kernels.own_kernels import digest_of
from nimble_jobs.kernels.ways import EXACT, Ways
from nimble_jobs.schedule import Program, View
from nimble_jobs.task_times import TaskTimes

_GAIN = 0.95  # the product must take less than this share
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides its time."""

    dtype: str  # torch's name without the prefix
    images: int
    channels: int
    height: int
    width: int
    features: int
    patch: tuple[int, int]  # height and width
    bias: bool
    channels_last: bool  # how the weight lies
    out_channels_last: bool  # how the result lies

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        size = "x".join(map(str, self.patch))
        picture = f"{self.images}x{self.channels}x{self.height}x{self.width}"
        return f"patches of {size}, {self.dtype}, {picture} to {self.features}"

    @property
    def weight(self) -> tuple[int, int, int, int]:
        """The weight's sizes."""
        return (self.features, self.channels, *self.patch)


Wanted = Callable[[Shape, torch.device], bool]  # whether a shape is to be computed as a product on a device


def wanted_as_in(program: Program) -> Wanted:
    """As in an earlier recording of the same module: no task reads a weight in the form that a convolution needs."""
    read = {view.shape for task in program.tasks for view in task.args if isinstance(view, View)}
    return lambda shape, _: shape.weight not in read


def rewrite(graph: Graph, device: torch.device, wanted: Wanted | None = None) -> int:
    """Make products of a graph of torch's functions, whose nodes carry fake tensors in `meta["example_value"]`.

    `wanted` says whether a shape is to be one; by default, whether that is faster. Returns how many there are.
    """
    wanted = wanted or is_faster
    count = 0
    for node in list(graph.nodes):
        if node.target not in (torch.conv2d, functional.conv2d):
            continue
        given = dict(zip(_CONVOLUTION, node.args, strict=False)) | dict(node.kwargs)
        shape = _shape(given, fixed_example(node), device)
        if shape is None or not wanted(shape, device):
            continue
        with graph.inserting_before(node):
            made = _product(graph, shape, given["input"], given["weight"], given.get("bias"))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        count += 1
    return count


def is_faster(shape: Shape, device: torch.device) -> bool:
    """Whether the product is faster than the library's convolution, now or as measured earlier."""
    more = {"task": "patches", "code": digest_of("patches_pass")}
    ways, ahead = ("library", "product"), choices.nothing_ahead
    return choices.way_for(shape, ways, device, lambda: _times(shape, device), ahead, **more) == "product"


def _times(shape: Shape, device: torch.device) -> TaskTimes:
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype(shape.dtype))
        last = shape.channels_last and len(sizes) == 4
        return made.contiguous(memory_format=torch.channels_last) if last else made

    x, weight = random(shape.images, shape.channels, shape.height, shape.width), random(*shape.weight)
    bias = random(shape.features) if shape.bias else None

    def library() -> torch.Tensor:
        return functional.conv2d(x, weight, bias, stride=shape.patch)

    def product() -> torch.Tensor:
        return as_product(shape, x, weight, bias)

    ways = Ways(shape.dtype)
    ways.add("product", lambda: product, library())
    return ways.times(shape.words, library, _GAIN, device)


def as_product(shape: Shape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution of x [images, channels, height, width] by a product of its patches with the weight."""
    made: torch.Tensor = _product(None, shape, x, weight, bias)
    return made


def _product(graph: Graph | None, shape: Shape, x: Any, weight: Any, bias: Any) -> Any:
    """With a graph, x, weight and bias are its nodes, and so is the result."""

    def method(name: str, value: Any, *args: Any) -> Any:
        return getattr(value, name)(*args) if graph is None else graph.call_method(name, (value, *args))

    (tall, wide), images, channels = shape.patch, shape.images, shape.channels
    down, across, size = shape.height // tall, shape.width // wide, channels * tall * wide
    if shape.channels_last:  # the sum is taken in the order in which weights lie
        patches = method("reshape", method("permute", x, 0, 2, 3, 1), images, down, tall, across, wide, channels)
        patches = method("permute", patches, 0, 1, 3, 2, 4, 5)
        factors = method("reshape", method("permute", weight, 0, 2, 3, 1), shape.features, size)
    else:
        patches = method("reshape", x, images, channels, down, tall, across, wide)
        patches = method("permute", patches, 0, 2, 4, 1, 3, 5)
        factors = method("reshape", weight, shape.features, size)
    rows = method("reshape", patches, images * down * across, size)
    args = (rows, factors, bias)
    made = functional.linear(*args) if graph is None else graph.call_function(functional.linear, args)
    made = method("permute", method("reshape", made, images, down, across, shape.features), 0, 3, 1, 2)
    return made if shape.out_channels_last else method("contiguous", made)


def _shape(given: dict[str, Any], out: torch.Tensor | None, device: torch.device) -> Shape | None:
    """The shape of a convolution whose windows cover the picture side by side; None for any other."""
    x, weight = (fixed_example(given.get(name)) for name in ("input", "weight"))
    if x is None or weight is None or out is None or x.dim() != 4 or x.device.type != device.type:
        return None
    if len({x.dtype, weight.dtype, out.dtype}) != 1 or str(x.dtype).removeprefix("torch.") not in EXACT:
        return None  # under autocast they may differ
    tall, wide = weight.shape[2:]
    plain = _pair(given.get("padding", 0)) == (0, 0) and _pair(given.get("dilation", 1)) == (1, 1)
    if not plain or given.get("groups", 1) != 1 or _pair(given.get("stride", 1)) != (tall, wide) or tall * wide == 1:
        return None
    if x.shape[2] % tall or x.shape[3] % wide or 0 in x.shape:
        return None
    features, down, across = out.shape[1:]
    last = same_strides(out, (down * across * features, 1, across * features, features))
    if not (last or out.is_contiguous()):
        return None
    return Shape(
        dtype=str(x.dtype).removeprefix("torch."),
        images=x.shape[0],
        channels=x.shape[1],
        height=x.shape[2],
        width=x.shape[3],
        features=weight.shape[0],
        patch=(tall, wide),
        bias=given.get("bias") is not None,
        channels_last=not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last),
        out_channels_last=last,
    )


def _pair(value: Any) -> Any:
    """Both directions of an argument; a name, such as "same", as it is."""
    if isinstance(value, int):
        return (value, value)
    return value if isinstance(value, str) else tuple(value) * (2 // len(value))
