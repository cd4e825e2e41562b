"""Puts the operators of `split_k` into a compiler's graph of aten operators: for convolutions where `epilogues` wants
them, and for linear layers where our kernel is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.kernels import ahead, choices
from nimble_jobs.kernels.fx_nodes import add_call
from nimble_jobs.kernels.split_k import CONVOLUTION, PRODUCT, code_digest, compiled
from nimble_jobs.kernels.split_k_shape import Shape, parts_of, product_shape
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.kernels.ways import Ways
from nimble_jobs.task_times import TaskTimes

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default  # of what means the same, the one that Inductor knows here
_GAIN = 0.95  # ours must take less than this share
_SMALL = 1 << 14  # results, which a kernel of its own adds up at little cost
_CACHED_BYTES = 128 << 20  # weights that take turns are larger than any cache: in a model they come from memory
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


def calls(shape: Shape, x: torch.Tensor, weight: torch.Tensor, device: torch.device) -> dict[str, Callable[[], object]]:
    """By way, a call that computes the parts of a convolution and adds them up, as the compiler's next kernel would.

    A way that does not work is left out.
    """
    if not shape.ways:
        return {}
    whole = CONVOLUTION(x, weight, shape.stride, shape.padding, "/1", shape.dilation)[0]
    ways = Ways(shape.dtype)
    for way in shape.ways:
        ways.add(way, functools.partial(_divided, shape, way, x, lambda: weight, device), whole.flatten(0, 2))
    return ways.calls


def _divided(
    shape: Shape, way: str, x: torch.Tensor, weight: Callable[[], torch.Tensor], device: torch.device
) -> Callable[[], torch.Tensor]:
    """A call that computes and adds up the parts. Raises EngineError if the kernel cannot be compiled."""
    kernel = compiled(shape, way, capability_of(device))
    parts = torch.full((parts_of(way), shape.pixels, shape.features), float("nan"), device=device)

    def call() -> torch.Tensor:
        kernel(x, weight(), parts)
        return parts.sum(0)

    return call


def split_convolution(graph: Graph, convolution: Node, way: str) -> None:
    """Put the operator in place of a convolution of channels-last tensors, and add its parts and the bias after it."""
    x, weight, bias, stride, padding, dilation = convolution.args[:6]
    assert isinstance(dilation, Sequence)
    more = [dilation] if any(each != 1 for each in dilation) else []  # as recordings name the operator's arguments
    with graph.inserting_before(convolution):
        parts = add_call(graph, CONVOLUTION, x, weight, stride, padding, way, *more)
        total = add_call(graph, _aten.permute.default, _total(graph, parts, way), [0, 3, 1, 2])
        if bias is not None:
            total = add_call(graph, _aten.add.Tensor, total, add_call(graph, _aten.view.default, bias, [1, -1, 1, 1]))
        made = add_call(graph, _CONVERT, total, convolution.meta["val"].dtype)
    convolution.replace_all_uses_with(made)
    graph.erase_node(convolution)


def split_products(graph: Graph, device: torch.device, chosen: Callable[[Shape, str], None] = lambda *_: None) -> None:
    """Divide the sums of linear layers where that is faster: of those that a pointwise kernel or a normalisation
    follows, and of small ones, such as a classifier's for few records.

    The graph is functional. `chosen` is called with each shape and its way, "library" or one of the shape's.
    """
    for node in list(graph.nodes):
        match = _match(node)
        if match is None:
            continue
        x, weight, bias, shape = match
        way = fastest(shape, device, followed=_feeds_pointwise(node))
        chosen(shape, way)
        if way == "library":
            continue
        with graph.inserting_before(node):
            total = _total(graph, add_call(graph, PRODUCT, x, weight, way), way)
            total = total if bias is None else add_call(graph, _aten.add.Tensor, total, bias)
            made = add_call(graph, _CONVERT, total, node.meta["val"].dtype)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()


def fastest(shape: Shape, device: torch.device, *, followed: bool = True) -> str:
    """The fastest way to run a product, now or as measured earlier. `followed`: a pointwise kernel runs in any case."""
    more = {"task": "linear layer", "code": code_digest(), "followed": str(followed)}
    each = functools.partial(ahead.each, compiled, shape, device)
    ways = ("library", *shape.ways)
    return choices.way_for(shape, ways, device, lambda: _times(shape, device, followed), each, **more)


def _times(shape: Shape, device: torch.device, followed: bool) -> TaskTimes:
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
        return made.mul_(sizes[-1] ** -0.5).to(dtype(shape.dtype))

    x, other = random(shape.pixels, shape.channels), random(shape.pixels, shape.features)
    many = max(2, min(64, _CACHED_BYTES // (2 * shape.features * shape.channels)))
    weights = [random(shape.features, shape.channels) for _ in range(many)]
    turn = [0]

    def weight() -> torch.Tensor:
        turn[0] += 1
        return weights[turn[0] % many]

    def library() -> torch.Tensor:
        product = torch.mm(x, weight().t())
        return torch.add(product, other) if followed else product  # the addition stands for the kernel that follows

    theirs = torch.mm(x, weights[0].t())
    ways = Ways(shape.dtype)
    for way in shape.ways:
        turn[0] = -1  # the next weight is the first
        ways.add(way, functools.partial(_divided, shape, way, x, weight, device), theirs)
    words = f"linear layer, {shape.dtype}, {shape.pixels}x{shape.channels} to {shape.features}"
    return ways.times(words, library, _GAIN, device)


def _match(node: Node) -> tuple[Node, Node, Node | None, Shape] | None:
    """The input, weight and bias of a linear layer whose result only pointwise operators read, or is small; None for
    others.
    """
    if node.target is _aten.addmm.default and not node.kwargs:
        bias, x, turned = node.args
    elif node.target is _aten.mm.default and not node.kwargs:
        bias, (x, turned) = None, node.args
    else:
        return None
    if not (isinstance(x, Node) and isinstance(turned, Node)):
        return None
    permuted = turned.target is _aten.permute.default and turned.args[1] == [1, 0]
    if turned.target is not _aten.t.default and not permuted:
        return None
    weight = turned.args[0]
    if not isinstance(weight, Node) or (isinstance(bias, Node) and bias.meta["val"].dim() != 1):
        return None
    x_val, weight_val, out = (each.meta["val"] for each in (x, weight, node))
    if not all(_is_dense(value) for value in (x_val, weight_val, out)):
        return None
    if out.numel() > _SMALL and not _feeds_pointwise(node):
        return None
    shape = product_shape(str(out.dtype).removeprefix("torch."), tuple(x_val.shape), tuple(weight_val.shape))
    return (x, weight, bias if isinstance(bias, Node) else None, shape) if shape.ways else None


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and all(isinstance(size, int) for size in value.shape)
        and value.is_contiguous()
    )


def _feeds_pointwise(node: Node) -> bool:
    """Whether all that read a node, also through views, are pointwise operators: the sum is part of their kernel."""
    users = list(node.users)
    for user in users:
        if user.target in _VIEWS:
            if not _feeds_pointwise(user):
                return False
        elif not (isinstance(user.target, OpOverload) and torch.Tag.pointwise in user.target.tags):
            return False
    return bool(users)


def _total(graph: Graph, parts: Node, way: str) -> Node:
    """The sum of all parts, in their order."""
    total = add_call(graph, _aten.select.int, parts, 0, 0)
    for part in range(1, parts_of(way)):
        total = add_call(graph, _aten.add.Tensor, total, add_call(graph, _aten.select.int, parts, 0, part))
    return total
