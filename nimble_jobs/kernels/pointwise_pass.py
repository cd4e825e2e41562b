"""A pass over the graph that a compiler is given: puts the operator of `pointwise` in place of a pointwise convolution
with its activation, or with a residual sum, where our kernel is faster.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.measure import copies_at_once
from nimble_jobs.kernels import ahead, choices
from nimble_jobs.kernels.activations import ACTIVATIONS, activation_of
from nimble_jobs.kernels.fx_nodes import between, comes_before, fixed_example, only_reads
from nimble_jobs.kernels.pointwise import OPERATOR, Shape, Wanted, code_digest, compiled, tensors_of
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.kernels.ways import Ways
from nimble_jobs.task_times import TaskTimes

_GAIN = 0.95  # ours must take less than this share
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_USUAL = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


@dataclass(frozen=True, kw_only=True)
class _Match:
    shape: Shape
    given: tuple[Node, Node, Node, Node | None]  # images, weight, bias, the other operand
    replaced: tuple[Node, Node]  # the last first, then the convolution

    @property
    def at(self) -> Node:
        """Where ours is put: what is read must be as it was there, also if other nodes write in place."""
        last, convolution = self.replaced
        return convolution if self.given[-1] is None else last


def rewrite(graph: Graph, device: torch.device, wanted: Wanted | None = None) -> int:
    """Put our operator into a graph of torch's functions, whose nodes carry fake tensors in `meta["example_value"]`.

    `wanted` says with which tile ours is to compute a shape; by default, the fastest. Returns how many there are.
    """
    wanted = wanted or fastest
    count = 0
    for last in list(graph.nodes):
        match = _match(last, device)
        tile = wanted(match.shape, device) if match is not None else None
        if match is None or tile is None:
            continue
        with graph.inserting_before(match.at):
            made = graph.call_function(OPERATOR, (*match.given, match.shape.activation, tile))
        made.meta = dict(last.meta)
        last.replace_all_uses_with(made)
        for node in match.replaced:
            graph.erase_node(node)
        count += 1
    return count


def fastest(shape: Shape, device: torch.device) -> str | None:
    """The tile with which our kernel is fastest; None if the library is, now or as measured earlier."""
    more = {"task": "pointwise convolution", "code": code_digest()}
    ways = ("library", *shape.tiles_beside(copies_at_once()))
    each = functools.partial(ahead.each, compiled, shape, device)
    way = choices.way_for(shape, ways, device, lambda: _times(shape, device), each, **more)
    return None if way == "library" else way


def _times(shape: Shape, device: torch.device) -> TaskTimes:
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
        return made.mul_(sizes[-1] ** -0.5).to(dtype(shape.dtype))

    rows, columns, bias = (
        random(shape.pixels, shape.inputs),
        random(shape.features, shape.inputs),
        random(shape.features),
    )
    other = random(shape.pixels, shape.features) if shape.added else None

    def library() -> torch.Tensor:  # a compiler adds bias and sum in the kernel of the activation
        product = torch.mm(rows, columns.t())
        if other is not None:
            return torch.add(product, other)
        return ACTIVATIONS[shape.activation](product)

    def pictures(values: torch.Tensor) -> torch.Tensor:
        return values.view(1, shape.pixels, 1, -1).permute(0, 3, 1, 2)

    ways = ways_of(
        shape, pictures(rows), columns[:, :, None, None], bias, None if other is None else pictures(other), device
    )
    return ways.times(shape.words, library, _GAIN, device)


def ways_of(
    shape: Shape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor | None,
    device: torch.device,
) -> Ways:
    """Our kernel with each tile worth trying, over channels-last pictures and the weight [features, inputs, 1, 1].

    Those that do not compute what torch computes are left out.
    """
    theirs = OPERATOR(x, weight, bias, other, shape.activation, "", shape.stride)
    out = torch.empty_like(theirs)

    def ours(tile: str) -> Callable[[], Any]:
        out.fill_(float("nan"))
        kernel = compiled(shape, tile, capability_of(device))
        return lambda: kernel(*tensors_of(x, weight, bias, other), out, *shape.sizes)

    ways = Ways(shape.dtype)
    for tile in shape.tiles_beside(copies_at_once()):
        ways.add(tile, functools.partial(ours, tile), theirs, out)
    return ways


def _match(last: Node, device: torch.device) -> _Match | None:
    """What our kernel can compute up to this node; None if it cannot, or need not."""
    activation = activation_of(last)
    if activation == "relu":
        return None  # `epilogues` compares all ways for that
    if activation is not None:
        convolution = last.args[0] if last.args else None
        return _of(last, convolution, None, activation, device)
    if last.target not in _ADDITIONS or len(last.args) != 2 or last.kwargs:
        return None
    if any(activation_of(user) for user in last.users):
        return None  # a compiler computes both in one kernel, and `epilogues` knows a sum with ReLU
    first, second = last.args
    found = _of(last, first, second, "", device)
    if found is None and last.target is not operator.iadd:  # which would write into the other operand
        found = _of(last, second, first, "", device)
    return found


def product_call(node: Any) -> tuple[Node, Node, Node] | None:
    """Images, weight and bias of a convolution that takes every pixel alone; None for any other node."""
    if not isinstance(node, Node) or node.target not in (torch.conv2d, functional.conv2d):
        return None
    given = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    if any(_pair(given.get(part, usual)) != _pair(usual) for part, usual in _USUAL.items()):
        return None
    x, weight, bias = (given.get(part) for part in _ARGUMENTS[:3])
    nodes = isinstance(x, Node) and isinstance(weight, Node) and isinstance(bias, Node)
    return (x, weight, bias) if nodes else None  # type: ignore[return-value]  # all are nodes


def _of(last: Node, convolution: Any, other: Any, activation: str, device: torch.device) -> _Match | None:
    call = product_call(convolution)
    if call is None or len(convolution.users) != 1 or convolution is other:
        return None
    x, weight, bias = call
    values = [fixed_example(node) for node in (x, weight, bias, convolution)]
    added = fixed_example(other) if other is not None else None
    if any(value is None for value in values) or (other is not None and added is None):
        return None
    shape = _shape(values, added, activation, device)
    if shape is None or not shape.tiles:
        return None
    if other is not None:
        if not all(only_reads(node) for node in between(convolution, last)):
            return None
        if not comes_before(other, convolution):
            return None  # the convolution would have to wait for what can run beside it, as in the cells of NASNet
    return _Match(shape=shape, given=(x, weight, bias, other), replaced=(last, convolution))


def _pair(value: Any) -> Any:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return pair * 2 if len(pair) == 1 else pair


def _shape(values: list[Any], added: Any, activation: str, device: torch.device) -> Shape | None:
    x, weight, bias, out = values
    pictures = [x, out, *([] if added is None else [added])]
    if any(each.dim() != 4 or not each.is_contiguous(memory_format=torch.channels_last) for each in pictures):
        return None
    if x.device.type != device.type or len({each.dtype for each in (*pictures, weight, bias)}) != 1:
        return None
    if not (weight.is_contiguous() and bias.is_contiguous()):  # our kernel could not take the operator's place
        return None
    if tuple(weight.shape[2:]) != (1, 1) or (added is not None and added.shape != out.shape):
        return None
    return Shape(
        dtype=str(x.dtype).removeprefix("torch."),
        pixels=x.shape[0] * x.shape[2] * x.shape[3],
        inputs=x.shape[1],
        features=weight.shape[0],
        added=added is not None,
        activation=activation,
    )
