"""A pass over the graph that a compiler is given: puts the operators of `squeeze_excite` in place of torch's own, where
our kernels for them are faster.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import choices
from nimble_jobs.kernels.own_kernels import digest_of
from nimble_jobs.kernels.squeeze_excite import EXCITE, SQUEEZE, Shape, Wanted, compiled, supported
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.kernels.ways import Ways, ends
from nimble_jobs.task_times import TaskTimes

_GAIN = 0.8  # ours must take less than this share: compilers fuse what torch's own operators do one by one
# With whether it is the smooth one.
_GATES = {torch.sigmoid: True, functional.sigmoid: True, "sigmoid": True, functional.hardsigmoid: False}
_ACTIVATIONS = {functional.silu: True, functional.relu: False, torch.relu: False}  # with whether it is SiLU
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True, kw_only=True)
class _Match:
    shape: Shape
    x: Node
    layers: tuple[Node, Node, Node, Node]  # weight and bias of the first layer, and of the second
    chain: tuple[Node, ...]  # from the product back to the average


def rewrite(graph: Graph, device: torch.device, wanted: Wanted | None = None) -> int:
    """Put our operators into a graph of torch's functions, whose nodes carry fake tensors in `meta["example_value"]`.

    `wanted` says whether ours are to compute a shape; by default, whether they are faster. Returns how many there are.
    """
    wanted = wanted or is_faster
    count = 0
    for product in list(graph.nodes):
        match = _match(product, device)
        if match is None or not wanted(match.shape, device):
            continue
        (weight, bias, gate_weight, gate_bias), shape = match.layers, match.shape
        with graph.inserting_before(product):
            parts = graph.call_function(SQUEEZE, (match.x, weight, shape.parts))
            args = (match.x, parts, bias, gate_weight, gate_bias, shape.silu, shape.sigmoid)
            scaled = graph.call_function(EXCITE, args)
        scaled.meta = dict(product.meta)
        product.replace_all_uses_with(scaled)
        for node in match.chain:
            graph.erase_node(node)
        count += 1
    return count


def is_faster(shape: Shape, device: torch.device) -> bool:
    """Whether our kernels are faster than torch's own operators, and agree with them, now or as measured earlier."""
    more = {
        "task": "squeeze-and-excitation",
        "code": digest_of("squeeze_excite", "squeeze_excite_triton", "activations_triton"),
    }

    def ahead(ways: Collection[str]) -> None:
        if "ours" in ways:
            compiled.ahead(shape, capability_of(device))

    return choices.way_for(shape, ("library", "ours"), device, lambda: _times(shape, device), ahead, **more) == "ours"


def _times(shape: Shape, device: torch.device) -> TaskTimes:
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype(shape.dtype))

    images, channels, hidden = shape.images, shape.channels, shape.hidden
    x = random(images, channels, shape.height, shape.width).contiguous(memory_format=torch.channels_last)
    weight, bias = random(hidden, channels, 1, 1).mul_(channels**-0.5), random(hidden)
    gate_weight, gate_bias = random(channels, hidden, 1, 1).mul_(hidden**-0.5), random(channels)
    parts = torch.empty((images, shape.parts, hidden), device=device)
    out = torch.empty_like(x)

    def library() -> torch.Tensor:
        inner = functional.conv2d(functional.adaptive_avg_pool2d(x, 1), weight, bias)
        inner = functional.silu(inner) if shape.silu else inner.relu()
        gate = functional.conv2d(inner, gate_weight, gate_bias)
        return x * (gate.sigmoid() if shape.sigmoid else functional.hardsigmoid(gate))

    def ours() -> Callable[[], None]:
        squeeze, excite = compiled(shape, capability_of(device))

        def both() -> None:
            squeeze(x, weight, parts)
            excite(x, parts, bias, gate_weight, gate_bias, out)

        return both

    theirs = EXCITE(x, SQUEEZE(x, weight, 1), bias, gate_weight, gate_bias, shape.silu, shape.sigmoid)
    ways = Ways(shape.dtype)
    ways.add("ours", ours, ends(theirs), ends(out))
    return ways.times(shape.words, library, _GAIN, device)


def _match(product: Node, device: torch.device) -> _Match | None:
    """Squeeze-and-excitation that ends in this product; None if it does not, or is not one that ours can compute."""
    if product.target not in (operator.mul, torch.mul) or len(product.args) != 2 or product.kwargs:
        return None
    for x, gate in (product.args, product.args[::-1]):
        if not (isinstance(x, Node) and isinstance(gate, Node)) or gate.target not in _GATES or not _only(gate):
            continue
        second = _layer(gate.args[0])
        activation = second[0].args[0] if second is not None else None
        if second is None or not isinstance(activation, Node) or activation.target not in _ACTIVATIONS:
            continue
        first = _layer(activation.args[0]) if _only(activation) else None
        average = first[0].args[0] if first is not None else None
        if first is None or not isinstance(average, Node) or not (_only(average) and _averages(average, x)):
            continue
        shape = _shape(x, first[1], second[1], silu=_ACTIVATIONS[activation.target], sigmoid=_GATES[gate.target])
        if shape is None or not _untouched(x, {product, average}) or _value(x).device.type != device.type:
            continue
        chain = (product, gate, second[0], activation, first[0], average)
        return _Match(shape=shape, x=x, layers=(*first[1:], *second[1:]), chain=chain)
    return None


def _layer(node: Any) -> tuple[Node, Node, Node] | None:
    """A 1x1 convolution with bias that has one user, with its weight and bias; None for anything else."""
    if not isinstance(node, Node) or node.target not in (torch.conv2d, functional.conv2d) or not _only(node):
        return None
    given = dict(zip(_CONVOLUTION, node.args, strict=False)) | dict(node.kwargs)
    weight, bias = given.get("weight"), given.get("bias")
    plain = given.get("padding", 0) in (0, (0, 0)) and given.get("groups", 1) == 1
    if not (plain and isinstance(weight, Node) and isinstance(bias, Node) and node.args):
        return None
    value = _value(weight)
    return (node, weight, bias) if isinstance(value, torch.Tensor) and tuple(value.shape[2:]) == (1, 1) else None


def _averages(node: Node, x: Node) -> bool:
    """Whether a node is the average of x over its pixels, with one pixel left."""
    given = (*node.args[1:2], *(node.kwargs[n] for n in ("output_size", "dim") if n in node.kwargs))
    if not node.args or node.args[0] is not x or len(given) != 1:
        return False
    if node.target is functional.adaptive_avg_pool2d:
        return given[0] in (1, (1, 1))
    if node.target not in ("mean", torch.mean) or "dtype" in node.kwargs:
        return False
    dims = given[0] if isinstance(given[0], (tuple, list)) else ()
    keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    return keeps is True and {d % 4 for d in dims if isinstance(d, int)} == {2, 3}


def _shape(x: Node, weight: Node, gate_weight: Node, *, silu: bool, sigmoid: bool) -> Shape | None:
    value, first, second = _value(x), _value(weight), _value(gate_weight)
    if not all(isinstance(each, torch.Tensor) for each in (value, first, second)) or value.dim() != 4:
        return None
    images, channels, height, width = value.shape
    hidden = first.shape[0]
    if not all(isinstance(size, int) for size in value.shape) or {value.dtype, first.dtype} != {second.dtype}:
        return None
    if first.shape[1] != channels or tuple(second.shape[:2]) != (channels, hidden):
        return None
    shape = Shape(
        dtype=str(value.dtype).removeprefix("torch."),
        images=images,
        channels=channels,
        height=height,
        width=width,
        hidden=hidden,
        silu=silu,
        sigmoid=sigmoid,
    )
    return shape if supported(shape) and value.is_contiguous(memory_format=torch.channels_last) else None


def _untouched(x: Node, readers: set[Node]) -> bool:
    """Whether nothing but these nodes uses x, nor the memory that it may share with what it was computed from."""
    if x.op == "placeholder":
        return False
    sources = [n for n in x.all_input_nodes if n.op != "placeholder"]
    return {*x.users} == readers and all({*n.users} == {x} for n in sources[:1])


def _only(node: Node) -> bool:
    return len(node.users) == 1


def _value(node: Node) -> Any:
    return node.meta.get("example_value")
