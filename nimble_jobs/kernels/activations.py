"""The activations that kernels of our own compute, and the nodes of a graph that are one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # in the order of the kernels' numbers
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}
_NAMES: dict[object, str] = {
    functional.relu: "relu",
    functional.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    functional.relu6: "relu6",
    functional.silu: "silu",
    functional.hardswish: "hardswish",
}
_METHODS = {"relu": "relu", "relu_": "relu"}  # of tensors


def activation_of(node: Node) -> str | None:
    """The one of ACTIVATIONS that a node of torch's functions computes; None if it computes another function."""
    if node.target is functional.hardtanh:
        bounds = (*node.args[1:3], *(node.kwargs[n] for n in ("min_val", "max_val") if n in node.kwargs))
        return "relu6" if bounds == (0.0, 6.0) else None
    return _METHODS.get(str(node.target)) if node.op == "call_method" else _NAMES.get(node.target)


def writes_in_place(activation: Node) -> bool:
    """Whether a node that is an activation writes over what it reads."""
    name = activation.target if isinstance(activation.target, str) else getattr(activation.target, "__name__", "")
    return name.endswith("_") or activation.kwargs.get("inplace", activation.args[-1:] == (True,)) is True
