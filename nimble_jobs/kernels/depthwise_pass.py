"""A pass over the graph that a compiler is given: puts the operator of `depthwise_activated` in place of a depthwise
convolution and its activation, where our kernel is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from nimble_jobs.engine.device import able
from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import ahead, choices, depthwise
from nimble_jobs.kernels.activations import ACTIVATIONS, activation_of
from nimble_jobs.kernels.depthwise_activated import OPERATOR, Activated, Wanted, compiled
from nimble_jobs.kernels.static_triton import MOST, TYPES, capability_of
from nimble_jobs.kernels.ways import Ways, ends
from nimble_jobs.task_times import TaskTimes

_GAIN = 0.95  # ours must take less than this share
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True, kw_only=True)
class _Match:
    one: Activated
    given: tuple[Node, Node, Node]  # images, weight, bias
    convolution: Node


def rewrite(graph: Graph, device: torch.device, wanted: Wanted | None = None) -> int:
    """Put our operator into a graph of torch's functions, whose nodes carry fake tensors in `meta["example_value"]`.

    `wanted` says with which tile ours is to compute one; by default, the fastest. Returns how many there are.
    """
    wanted = wanted or fastest
    count = 0
    for activation in list(graph.nodes):
        match = _match(activation, device)
        tile = wanted(match.one, device) if match is not None else None
        if match is None or tile is None:
            continue
        shape = match.one.shape
        args = (*match.given, shape.stride, shape.padding, shape.dilation, match.one.activation, tile)
        with graph.inserting_before(match.convolution):  # later its input may have been written to in place
            made = graph.call_function(OPERATOR, args)
        made.meta = dict(activation.meta)
        activation.replace_all_uses_with(made)
        graph.erase_node(activation)
        graph.erase_node(match.convolution)
        count += 1
    return count


def begin_plain(graph: Graph, device: torch.device) -> None:
    """Have other processes begin with kernels for the depthwise convolutions that a graph still holds: those that
    `depthwise` will time once the graph is compiled. A build that has measured nothing so far knows its tasks from
    earlier ones, and will hardly time these.
    """
    if not able(device).kernels or not choices.current().measured:
        return
    for node in graph.nodes:
        found = depthwise_call(node, device)
        if found is not None:
            ahead.each(depthwise.compiled, found[0], device, found[0].tiles)


def fastest(one: Activated, device: torch.device) -> str | None:
    """The tile with which our kernel is fastest; None if the library's and another one are, or ours does not agree with
    them, now or as measured earlier.
    """
    more = {"task": "depthwise convolution, activated", "activation": one.activation, "code": depthwise.code_digest()}
    each = partial(ahead.each, depthwise.compiled, one.shape, device, last=(one.activation,))
    way = choices.way_for(one.shape, ("library", *one.tiles), device, lambda: _times(one, device), each, **more)
    return None if way == "library" else way


def _times(one: Activated, device: torch.device) -> TaskTimes:
    shape, generator = one.shape, torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype(shape.dtype))

    x = random(shape.images, shape.channels, shape.height, shape.width).contiguous(memory_format=torch.channels_last)
    weight, bias = random(shape.channels, 1, shape.kernel, shape.kernel), random(shape.channels)
    settings = (shape.stride, shape.padding, shape.dilation)
    theirs = OPERATOR(x, weight, bias, *settings, one.activation, "")
    out = torch.empty_like(theirs)

    def library() -> torch.Tensor:  # a compiler adds the bias in the kernel of the activation
        return ACTIVATIONS[one.activation](functional.conv2d(x, weight, None, *settings, shape.channels))

    def ours(tile: str) -> Callable[[], object]:
        kernel = compiled(one, tile, capability_of(device))
        out.fill_(float("nan"))
        return lambda: kernel(x, weight, bias, out, *shape.sizes(tile))

    ways = Ways(shape.dtype)
    for tile in one.tiles:
        ways.add(tile, partial(ours, tile), ends(theirs), ends(out))
    return ways.times(one.words, library, _GAIN, device)


def _match(activation: Node, device: torch.device) -> _Match | None:
    """A depthwise convolution with bias that only this activation reads; None if ours cannot compute it."""
    name, convolution = activation_of(activation), activation.args[0] if activation.args else None
    if name is None or not isinstance(convolution, Node) or len(convolution.users) != 1:
        return None
    found = depthwise_call(convolution, device)
    if found is None:
        return None
    shape, x, weight, bias = found
    if bias is None:
        return None
    return _Match(one=Activated(shape=shape, activation=name), given=(x, weight, bias), convolution=convolution)


def depthwise_call(convolution: Node, device: torch.device) -> tuple[depthwise.Shape, Node, Node, Node | None] | None:
    """What a node computes, with its images, weight and bias, if it is a depthwise convolution over channels-last
    images that our kernel can compute; None for any other node.
    """
    if convolution.target not in (torch.conv2d, functional.conv2d):
        return None
    given = dict(zip(_CONVOLUTION, convolution.args, strict=False)) | dict(convolution.kwargs)
    x, weight, bias = (given.get(part) for part in _CONVOLUTION[:3])
    if not (isinstance(x, Node) and isinstance(weight, Node) and (bias is None or isinstance(bias, Node))):
        return None
    settings = [_both(given.get(part, usual)) for part, usual in (("stride", 1), ("padding", 0), ("dilation", 1))]
    nodes = [each for each in (x, weight, bias, convolution) if each is not None]
    values = [each.meta.get("example_value") for each in nodes]
    if None in settings or not all(isinstance(value, torch.Tensor) for value in values):
        return None
    shape = _shape(values, [int(each) for each in settings if each is not None], device)
    return None if shape is None else (shape, x, weight, bias)


def _both(value: Any) -> int | None:
    """A setting that is the same in both directions."""
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    return pair[0] if len(set(pair)) == 1 and isinstance(pair[0], int) else None


def _shape(values: list[Any], settings: list[int], device: torch.device) -> depthwise.Shape | None:
    x, weight, *_, out = values
    kernel = weight.shape[-1]
    whole = x.dim() == 4 and all(isinstance(size, int) for size in (*x.shape, *out.shape)) and 0 not in out.shape
    if not whole or x.device.type != device.type or len({value.dtype for value in values}) != 1:
        return None
    name = str(x.dtype).removeprefix("torch.")
    fits = tuple(weight.shape) == (x.shape[1], 1, kernel, kernel) and kernel in depthwise.KERNELS and x.shape[1] > 1
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)  # one channel: the same
    last = x.is_contiguous(memory_format=torch.channels_last)
    if not (fits and dense and last) or name not in TYPES or max(x.numel(), out.numel()) >= MOST:
        return None
    stride, padding, dilation = settings
    return depthwise.Shape(
        dtype=name,
        images=x.shape[0],
        channels=x.shape[1],
        height=x.shape[2],
        width=x.shape[3],
        out_height=out.shape[2],
        out_width=out.shape[3],
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        channels_last=True,
    )
