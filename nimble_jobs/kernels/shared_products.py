"""A pass over a compiler's graph that computes equal matrix products only once.

Layers that share one weight and read the same input (`planner.sources.merge`) each compute the same product and take
their own features from it. Inductor merges equal pointwise expressions, but not calls of a library.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten
_SHARED = {
    _aten.addmm.default,
    _aten.mm.default,
    _aten.permute.default,
    _aten.reshape.default,
    _aten.t.default,
    _aten.view.default,
    _aten._unsafe_view.default,
}


def share_products(graph: Graph) -> int:
    """Merge products of equal operands, and views of equal tensors, in a functional graph of aten operators.

    Returns how many products were removed.
    """
    first: dict[Hashable, Node] = {}
    gone = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _SHARED:
            continue
        key = (node.target, _hashable(node.args), _hashable(tuple(sorted(node.kwargs.items()))))
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            gone += node.target in (_aten.addmm.default, _aten.mm.default)
    graph.lint()
    return gone


def _hashable(value: Any) -> Hashable:
    """A hashable form of an argument. Nodes equal only themselves, and 1 does not equal 1.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v) for v in value)
    return (type(value), value)
