"""A pass over the graph that a compiler is given: puts the operator of `product_gelu` in place of a linear layer with
GELU, where our kernel is faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import ahead, choices
from nimble_jobs.kernels.own_kernels import digest_of
from nimble_jobs.kernels.product_gelu import OPERATOR, Shape, Wanted, compiled
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.kernels.ways import Ways
from nimble_jobs.task_times import TaskTimes

_GAIN = 0.95  # ours must take less than this share
_CACHED_BYTES = 128 << 20  # weights that take turns are larger than any cache: in a model they come from memory


def rewrite(graph: Graph, device: torch.device, wanted: Wanted | None = None) -> int:
    """Put our operator into a graph of torch's functions, whose nodes carry fake tensors in `meta["example_value"]`.

    `wanted` says with which tile ours is to compute a shape; by default, the fastest. Returns how many there are.
    """
    wanted = wanted or fastest
    count = 0
    for gelu in list(graph.nodes):
        linear = gelu.args[0] if gelu.target is functional.gelu and gelu.args else None
        shape = _shape(gelu, linear, device)
        tile = wanted(shape, device) if shape is not None else None
        if tile is None or not isinstance(linear, Node):
            continue
        with graph.inserting_before(linear):  # later its input may have been written to in place
            made = graph.call_function(OPERATOR, (*linear.args[:3], tile))
        made.meta = dict(gelu.meta)
        gelu.replace_all_uses_with(made)
        graph.erase_node(gelu)
        graph.erase_node(linear)
        count += 1
    return count


def fastest(shape: Shape, device: torch.device) -> str | None:
    """The tile with which our kernel is fastest; None if the library is, now or as measured earlier."""
    more = {"task": "linear layer, GELU", "code": digest_of("product_gelu", "product_gelu_triton")}
    each = functools.partial(ahead.each, compiled, shape, device)
    way = choices.way_for(shape, ("library", *shape.tiles), device, lambda: _times(shape, device), each, **more)
    return None if way == "library" else way


def _times(shape: Shape, device: torch.device) -> TaskTimes:
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
        return made.mul_(sizes[-1] ** -0.5).to(dtype(shape.dtype))

    x, bias = random(shape.rows, shape.inputs), random(shape.features)
    many = max(2, min(64, _CACHED_BYTES // (2 * shape.features * shape.inputs)))
    weights = [random(shape.features, shape.inputs) for _ in range(many)]
    turn = [0]

    def weight() -> torch.Tensor:
        turn[0] += 1
        return weights[turn[0] % many]

    def library() -> torch.Tensor:  # a compiler adds the bias in the kernel of the activation
        return functional.gelu(functional.linear(x, weight()))

    theirs = OPERATOR(x, weights[0], bias, "")
    out = torch.empty_like(theirs)

    def ours(tile: str) -> Callable[[], Any]:
        out.fill_(float("nan"))
        turn[0] = -1  # the next weight is the first
        kernel = compiled(shape, tile, capability_of(device))
        return lambda: kernel(x, weight(), bias, out, *shape.sizes)

    ways = Ways(shape.dtype)
    for tile in shape.tiles:
        ways.add(tile, functools.partial(ours, tile), theirs, out)
    return ways.times(shape.words, library, _GAIN, device)


def _shape(gelu: Node, linear: Any, device: torch.device) -> Shape | None:
    """Of a linear layer with bias that only this exact GELU reads; None for anything else, or if ours cannot."""
    if not isinstance(linear, Node) or linear.target is not functional.linear or len(linear.users) != 1:
        return None
    if gelu.kwargs.get("approximate", "none") != "none" or len(linear.args) != 3 or linear.kwargs:
        return None
    values: list[Any] = [each.meta.get("example_value") for each in linear.args if isinstance(each, Node)]
    if len(values) != 3 or not all(isinstance(value, torch.Tensor) for value in values):
        return None
    x, weight, bias = values
    sizes = (*x.shape, *weight.shape)
    if not all(isinstance(size, int) for size in sizes) or len({x.dtype, weight.dtype, bias.dtype}) != 1:
        return None
    if x.device.type != device.type or not (x.is_contiguous() and weight.is_contiguous()) or x.dim() < 2:
        return None
    shape = Shape(
        dtype=str(x.dtype).removeprefix("torch."),
        rows=math.prod(x.shape[:-1]),
        features=weight.shape[0],
        inputs=weight.shape[1],
    )
    return shape if shape.tiles else None
