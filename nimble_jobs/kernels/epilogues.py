"""A pass over a compiler's graph that picks the fastest way to run each convolution with its bias, addition and
activation, of those that `epilogue_ways` knows and measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from nimble_jobs.engine.fused_convolutions import CONVOLUTION_ADD_RELU, CONVOLUTION_RELU, MEMORY_FORMAT
from nimble_jobs.engine.private.modes import modes_off
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.kernel_switches import NOTHING, Without
from nimble_jobs.kernels import pointwise, split_k_pass
from nimble_jobs.kernels.epilogue_ways import POINTWISE, Follows, Group, Way, fastest
from nimble_jobs.kernels.fx_nodes import add_call, only_user

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class _Match:
    group: Group
    convolution: Node
    add: Node | None
    relu: Node | None
    other: Node | None  # the other operand of the addition

    @property
    def last(self) -> Node:
        return self.relu or self.add or self.convolution


def choose_ways(
    graph: Graph,
    device: torch.device,
    chosen: Callable[[Group, Way], None] = lambda *_: None,
    *,
    without: Without = NOTHING,
) -> None:
    """Rewrite each convolution of a functional graph of aten operators so that it runs in its fastest way on a GPU.

    Nodes carry fake tensors in `meta["val"]`. Only two-dimensional convolutions over channels-last tensors are
    considered. `chosen` is called with each and its way. Ways that are in `without` are not tried.
    """
    for convolution in list(graph.find_nodes(op="call_function", target=_aten.convolution.default)):
        match = _match(convolution)
        if match is None:
            continue
        with modes_off():
            way = fastest(match.group, device, without)
        chosen(match.group, way)
        if way == "fused":
            _fuse(graph, match)
        elif way == "product":
            _to_product(graph, match)
        elif way.startswith(POINTWISE):
            _to_pointwise(graph, match, way.removeprefix(POINTWISE))
        elif way != "library":
            split_k_pass.split_convolution(graph, match.convolution, way)
    graph.eliminate_dead_code()
    graph.lint()


def _match(convolution: Node) -> _Match | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = convolution.args
    values = [n.meta.get("val") for n in (x, weight, convolution) if isinstance(n, Node)]
    if transposed or len(values) != 3 or not all(_is_channels_last(v) for v in values):
        return None
    add = relu = other = None
    next_one = only_user(convolution)
    if next_one is not None and next_one.target is _aten.add.Tensor and not next_one.kwargs and len(next_one.args) == 2:
        others = [a for a in next_one.args if a is not convolution]
        if len(others) == 1 and isinstance(others[0], Node) and _alike(others[0], convolution):
            add, other = next_one, others[0]
            next_one = only_user(add)
    if next_one is not None and next_one.target is _aten.relu.default:
        relu = next_one
    if all(_is_pointwise(user) for user in (relu or add or convolution).users):
        add = relu = other = None  # a kernel that computes more than these follows in any case
    alone: Follows = (
        "bias" if bias is not None and not all(_is_pointwise(user) for user in convolution.users) else "nothing"
    )
    follows: Follows = "add-relu" if add and relu else "add" if add else "relu" if relu else alone
    (x_val, weight_val, out_val) = values
    assert x_val is not None
    assert weight_val is not None
    assert out_val is not None
    group = Group(
        dtype=out_val.dtype,
        x=tuple(x_val.shape),
        weight=tuple(weight_val.shape),
        out=tuple(out_val.shape),
        bias=bias is not None,
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        groups=int(groups),  # type: ignore[arg-type]  # the schema says int
        follows=follows,
    )
    return _Match(group=group, convolution=convolution, add=add, relu=relu, other=other)


def _is_pointwise(node: Node) -> bool:
    """Whether a compiler fuses this node with the nodes that it reads."""
    if node.target is _aten.cat.default:
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _pair(value: Any) -> tuple[int, ...]:
    given = tuple(int(v) for v in value)
    return given * 2 if len(given) == 1 else given


def _is_channels_last(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 4
        and value.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and all(isinstance(n, int) for n in value.shape)
        and value.is_contiguous(memory_format=MEMORY_FORMAT)
    )


def _alike(one: Node, other: Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    return a is not None and b is not None and _is_channels_last(a) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _fuse(graph: Graph, match: _Match) -> None:
    x, weight, bias = match.convolution.args[:3]
    group = match.group
    settings = (list(group.stride), list(group.padding), list(group.dilation), group.groups)
    if match.other is None:
        _replace(graph, match.last, CONVOLUTION_RELU, x, weight, bias, *settings)
    else:
        _replace(graph, match.last, CONVOLUTION_ADD_RELU, x, weight, match.other, bias, *settings)


def _to_product(graph: Graph, match: _Match) -> None:
    x, weight, bias = match.convolution.args[:3]
    images, channels, height, width = match.group.x
    features = match.group.weight[0]
    with_relu = match.group.follows == "relu" and bias is not None
    with_bias = match.group.follows == "bias"
    at = match.relu if with_relu and match.relu is not None else match.convolution
    with graph.inserting_before(at):
        rows = add_call(graph, _aten.permute.default, x, [0, 2, 3, 1])
        rows = add_call(graph, _aten.view.default, rows, [images * height * width, channels])
        columns = add_call(graph, _aten.view.default, weight, [features, channels])
        columns = add_call(graph, _aten.permute.default, columns, [1, 0])
        if with_relu:
            product = add_call(graph, _aten._addmm_activation.default, bias, rows, columns)
        elif with_bias:
            product = add_call(graph, _aten.addmm.default, bias, rows, columns)
        else:
            product = add_call(graph, _aten.mm.default, rows, columns)
        shaped = add_call(graph, _aten.view.default, product, [images, height, width, features])
        shaped = add_call(graph, _aten.permute.default, shaped, [0, 3, 1, 2])
        if bias is not None and not (with_relu or with_bias):
            spread = add_call(graph, _aten.view.default, bias, [1, features, 1, 1])
            shaped = add_call(graph, _aten.add.Tensor, shaped, spread)  # part of the pointwise kernel that follows
    at.replace_all_uses_with(shaped)
    graph.erase_node(at)


def _to_pointwise(graph: Graph, match: _Match, tile: str) -> None:
    shape = match.group.pointwise
    given = (*match.convolution.args[:3], match.other)
    _replace(graph, match.last, pointwise.OPERATOR, *given, shape.activation, tile, shape.stride)


def _replace(graph: Graph, node: Node, target: Any, *args: Any) -> None:
    with graph.inserting_before(node):
        made = add_call(graph, target, *args)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
