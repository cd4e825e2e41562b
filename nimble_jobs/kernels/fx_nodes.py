"""Nodes of the graphs that compilers work on: what they stand for, and new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from nimble_jobs.engine.private.operators import OpOverload, write_arguments
from nimble_jobs.engine.private.tensors import tree_leaves

_READING = (torch.conv2d, functional.conv2d, functional.interpolate)


def fixed_example(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node in a graph of torch's functions, if it has fixed sizes; None for anything else."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    fixed = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
    return value if fixed else None


def only_reads(node: Node) -> bool:
    """Whether a node of a graph of torch's functions is known to write to no memory that was there before it."""
    if not node.all_input_nodes:
        return True
    if isinstance(node.target, OpOverload):
        return not write_arguments(node.target, node.args, node.kwargs)
    return node.target in _READING


def between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes of a graph between two of them."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def only_user(node: Node) -> Node | None:
    """The node that reads this one; None if none does, or several do."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def comes_before(node: Node, later: Node) -> bool:
    """Whether a node has to be computed before the later one in any case."""
    if node.op == "placeholder":
        return True
    seen: set[Node] = set()
    waiting = [later]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before is node:
                return True
            if before not in seen and before > node:  # in the graph's order
                seen.add(before)
                waiting.append(before)
    return False


def same_strides(value: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these strides. Those of dimensions with one element do not matter."""
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in pairs)


def add_call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a node to a graph of aten operators, with its fake result in `meta["val"]`, as its arguments have theirs.

    An operator that needs exact strides gets its arguments with theirs. Inductor may lay them out otherwise, unless
    `meta["eager_input_vals"]` has them, too.
    """
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    modes = [v.fake_mode for v in tree_leaves(values) if hasattr(v, "fake_mode")]
    with modes[0]:
        node.meta["val"] = target(*values, **kwargs)
    if torch.Tag.needs_exact_strides in target.tags:
        node.meta["eager_input_vals"] = (values, kwargs)
    return node
