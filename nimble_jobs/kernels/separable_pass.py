"""A pass over the graph that a compiler is given: puts the operator of `separable` in place of a depthwise-separable
convolution, with what stands before, between and after its two, where one kernel is faster than the fastest two.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from nimble_jobs.engine import measure
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.first_calls import without_cudnn
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels import ahead, choices, depthwise, fx_nodes, pointwise, pointwise_pass
from nimble_jobs.kernels.activations import ACTIVATIONS, activation_of, writes_in_place
from nimble_jobs.kernels.depthwise_pass import depthwise_call
from nimble_jobs.kernels.fx_nodes import fixed_example, only_reads, only_user
from nimble_jobs.kernels.own_kernels import digest_of
from nimble_jobs.kernels.separable import OPERATOR, Shape, Wanted, code_digest, compiled, tensors_of
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.kernels.ways import Ways
from nimble_jobs.task_times import TaskTimes

_GAIN = 0.95  # ours must take less than this share
_ADDITIONS = (operator.add, torch.add)


@dataclass(frozen=True, kw_only=True)
class _Match:
    shape: Shape
    given: tuple[Node | None, ...]  # images, weight and bias of the window, weight, bias, the other operand
    replaced: tuple[Node, ...]  # in the graph's order
    rectifier: Node | None  # the ReLU before it

    @property
    def at(self) -> Node:
        """Where ours is put: what is read must be as it was there, also if other nodes write in place."""
        return self.replaced[0] if self.given[-1] is None else self.replaced[-1]


def rewrite(graph: Graph, device: torch.device, wanted: Wanted | None = None) -> int:
    """Put our operator into a graph of torch's functions, whose nodes carry fake tensors in `meta["example_value"]`.

    `wanted` says with which tile ours is to compute a shape; by default, the fastest. Returns how many there are.
    """
    wanted = wanted or fastest
    count, ends = 0, set()
    for node in list(graph.nodes):
        match = _match(node, device)
        if match is None:
            continue
        if match.rectifier in ends and choices.looks_ahead():  # the convolution before may take the ReLU over
            wanted(replace(match.shape, rectified=False), device)
        tile = wanted(match.shape, device)
        if tile is None:
            ends.add(match.replaced[-1])
            continue
        shape, last = match.shape, match.replaced[-1]
        settings = (shape.depth.stride, shape.depth.padding, shape.depth.dilation)
        with graph.inserting_before(match.at):
            made = graph.call_function(
                OPERATOR, (*match.given, *settings, shape.rectified, shape.between, shape.activation, tile)
            )
        made.meta = dict(last.meta)
        last.replace_all_uses_with(made)
        for each in reversed(match.replaced):
            graph.erase_node(each)
        count += 1
    return count


def fastest(shape: Shape, device: torch.device) -> str | None:
    """The tile with which our kernel is fastest; None if two kernels are, now or as measured earlier."""
    more = {
        "task": "separable convolution",
        "code": code_digest(),
        "other code": digest_of("separable_pass", "depthwise", "depthwise_triton", "pointwise", "pointwise_triton"),
    }

    def ahead_of(ways: Collection[str]) -> None:
        ahead.each(compiled, shape, device, ways)
        if len(ways) > 1:  # they are timed
            second = _product_shape(shape)
            ahead.each(pointwise.compiled, second, device, second.tiles_beside(measure.copies_at_once()))
            ahead.each(depthwise.compiled, shape.depth, device, shape.depth.tiles, last=(_activation(shape),))

    way = choices.way_for(shape, ("library", *shape.tiles), device, lambda: _times(shape, device), ahead_of, **more)
    return None if way == "library" else way


def _times(shape: Shape, device: torch.device) -> TaskTimes:
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone
    depth = shape.depth

    def random(*sizes: int, over: int = 1) -> torch.Tensor:
        made = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
        return made.mul_(over**-0.5).to(dtype(depth.dtype))

    def images(channels: int, height: int, width: int) -> torch.Tensor:
        return random(depth.images, channels, height, width).contiguous(memory_format=torch.channels_last)

    x = images(depth.channels, depth.height, depth.width)
    depth_weight = random(depth.channels, 1, depth.kernel, depth.kernel, over=depth.kernel**2)
    depth_bias = random(depth.channels) if shape.depth_bias else None
    weight, bias = random(shape.features, depth.channels, 1, 1, over=depth.channels), random(shape.features)
    other = images(shape.features, depth.out_height, depth.out_width) if shape.added else None
    given = (x, depth_weight, depth_bias, weight, bias, other)
    settings = (depth.stride, depth.padding, depth.dilation, shape.rectified, shape.between, shape.activation)
    theirs = without_cudnn(OPERATOR, convolutions=True)(*given, *settings, "")
    out = torch.empty_like(theirs)

    def ours(tile: str) -> Callable[[], Any]:
        out.fill_(float("nan"))
        kernel = compiled(shape, tile, capability_of(device))
        return lambda: kernel(*tensors_of(*given), out, *shape.sizes)

    ways = Ways(depth.dtype)
    for tile in shape.tiles:
        ways.add(tile, functools.partial(ours, tile), theirs, out)
    pairs = list(_pairs(shape, x, depth_weight, depth_bias, weight, bias, other, device))
    us = measure.kernel_times_us([*pairs, *ways.calls.values()], device)
    times = {"library": min(us[: len(pairs)])} | dict(zip(ways.calls, us[len(pairs) :], strict=True))
    return choices.fastest_of(shape.words, times, _GAIN, ways.failed)


def _pairs(
    shape: Shape,
    x: torch.Tensor,
    depth_weight: torch.Tensor,
    depth_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None,
    device: torch.device,
) -> Iterator[Callable[[], object]]:
    """The ways to compute it in two kernels: the window's, and a product by the library or by our own kernel."""
    windows, middle = _windows(shape, x, depth_weight, depth_bias, device)
    rows = middle.permute(0, 2, 3, 1).reshape(-1, shape.depth.channels)
    columns = weight.reshape(shape.features, -1).t()

    def product() -> torch.Tensor:
        if not shape.added and not shape.activation:
            return torch.addmm(bias, rows, columns)
        if shape.activation == "relu" and not shape.added and rows.is_cuda:
            found: torch.Tensor = torch.ops.aten._addmm_activation(bias, rows, columns)
            return found
        found = torch.mm(rows, columns)
        if other is not None:  # a compiler adds the bias, and computes the activation, in this kernel
            return torch.add(found, other.permute(0, 2, 3, 1).reshape(-1, shape.features))
        return ACTIVATIONS[shape.activation](found)

    ours = pointwise_pass.ways_of(_product_shape(shape), middle, weight, bias, other, device)
    products = [product, *ours.calls.values()]
    for pair in itertools.product(windows, products):
        yield functools.partial(_in_turn, *pair)


def _product_shape(shape: Shape) -> pointwise.Shape:
    """The second of the two kernels."""
    depth = shape.depth
    return pointwise.Shape(
        dtype=depth.dtype,
        pixels=depth.places,
        inputs=depth.channels,
        features=shape.features,
        added=shape.added,
        activation=shape.activation,
    )


def _activation(shape: Shape) -> str | None:
    """Of the first of the two kernels; None if it adds no bias."""
    return shape.between if shape.depth_bias else None


def _in_turn(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


def _windows(
    shape: Shape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device
) -> tuple[list[Callable[[], object]], torch.Tensor]:
    """Calls of the convolution over a window, with what stands between, in kernels of our own or else the library's;
    and what they compute. The ReLU before it belongs to the kernel that makes its input.
    """
    depth, capability = shape.depth, capability_of(device)

    def library() -> torch.Tensor:
        found = functional.conv2d(x, weight, bias, depth.stride, depth.padding, depth.dilation, depth.channels)
        return ACTIVATIONS[shape.between](found) if shape.between else found

    middle = without_cudnn(library, convolutions=True)().contiguous(memory_format=torch.channels_last)
    given = (*depthwise.tensors_of(depth, x, weight, bias), middle)
    windows: list[Callable[[], object]] = []
    for tile in depth.tiles:
        with contextlib.suppress(EngineError):
            kernel = depthwise.compiled(depth, tile, capability, _activation(shape))
            windows.append(functools.partial(kernel, *given, *depth.sizes(tile)))
    return windows or [library], middle


def _match(product: Node, device: torch.device) -> _Match | None:
    """What our kernel can compute around a product, if that is the second of the two; None if it cannot."""
    call = pointwise_pass.product_call(product)
    if call is None:
        return None
    middle, weight, bias = call
    between = activation_of(middle) or ""
    window = next(iter(middle.all_input_nodes), None) if between else middle
    found = depthwise_call(window, device) if window is not None else None
    if found is None or window is None or len(window.users) != 1 or len(middle.users) != 1:
        return None
    depth, images, depth_weight, depth_bias = found
    if bool(between) != (depth_bias is not None):
        return None  # there is no kernel for the window alone to compare with
    relu = images if activation_of(images) == "relu" and not writes_in_place(images) else None
    read_at = relu or window
    if relu is not None:
        (images,) = relu.all_input_nodes
    tail, other, activation = _after(product, window)
    alone = [relu] if relu is not None and len(relu.users) == 1 else []
    nodes = tuple(dict.fromkeys([*alone, window, middle, *tail]))  # without activation `middle` is the window
    values = [fixed_example(node) for node in (weight, bias, nodes[-1], *([] if other is None else [other]))]
    read = [fixed_example(images), *([] if depth_bias is None else [fixed_example(depth_bias)])]
    if not _suits(values, depth.dtype) or not _lie(read):
        return None
    shape = Shape(
        depth=depth,
        features=values[0].shape[0],  # type: ignore[union-attr]  # none is None
        rectified=relu is not None,
        depth_bias=depth_bias is not None,
        between=between,
        added=other is not None,
        activation=activation,
    )
    given = (images, depth_weight, depth_bias, weight, bias, other)
    match = _Match(shape=shape, given=given, replaced=nodes, rectifier=relu)
    unchanged = all(only_reads(node) for node in fx_nodes.between(read_at, nodes[-1]) if node not in nodes)
    there = all(node is None or node < match.at for node in match.given)
    return match if shape.tiles and unchanged and there else None


def _after(product: Node, window: Node) -> tuple[list[Node], Node | None, str]:
    """The nodes that can be computed with a product, itself first; the other operand of a sum; and the activation."""
    found, other = [product], None
    user = only_user(product)
    if user is not None and user.target in _ADDITIONS and len(user.args) == 2 and not user.kwargs:
        first, second = user.args
        added = second if first is product else first
        if isinstance(added, Node) and added is not product and _like(added, product):
            if not fx_nodes.comes_before(added, window):
                return found, None, ""
            found, other = [product, user], added
    user = only_user(found[-1])
    activation = (activation_of(user) if user is not None else None) or ""
    return [*found, *([user] if user is not None and activation else [])], other, activation


def _like(one: Node, other: Node) -> bool:
    """Whether two nodes have the same shape."""
    values = fixed_example(one), fixed_example(other)
    return None not in values and values[0].shape == values[1].shape  # type: ignore[union-attr]  # none is None


def _suits(values: list[torch.Tensor | None], kind: str) -> bool:
    """Whether weight, bias, result and other operand lie as our kernel reads and writes them."""
    weight, bias, *results = values
    if weight is None or bias is None or any(each is None or each.dim() != 4 for each in results):
        return False
    return (
        {str(each.dtype) for each in values if each is not None} == {f"torch.{kind}"}
        and len({each.shape for each in results if each is not None}) == 1
        and all(each.is_contiguous(memory_format=torch.channels_last) for each in results if each is not None)
        and tuple(weight.shape[2:]) == (1, 1)
        and weight.is_contiguous()  # else our kernel could not take the operator's place
        and bias.is_contiguous()
    )


def _lie(read: list[torch.Tensor | None]) -> bool:
    """Whether the images, which may be those before a ReLU, and the window's bias lie without gaps."""
    images, *biases = read
    if images is None or not images.is_contiguous(memory_format=torch.channels_last):
        return False
    return all(bias is not None and bias.is_contiguous() for bias in biases)
