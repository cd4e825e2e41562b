"""Private names around tensors: identity, versions, hooks on gradients, and nested values."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor, valid while any tensor over it lives."""
    return int(tensor.untyped_storage()._cdata)


def tensor_id(tensor: torch.Tensor) -> int:
    """Identity of what a tensor's Python object stands for, valid while it stands for it."""
    return int(tensor._cdata)


def gradient_hooks(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The tables of hooks that autograd runs when a leaf's gradient arrives, and once it is added up."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [table for table in tables if table is not None]


def dict_behind(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The dict itself, for what a class shows of its own."""
    if not isinstance(value, MappingProxyType):
        return value
    behind: dict[str, Any] = gc.get_referents(value)[0]
    return behind


def tree_leaves(value: Any) -> list[Any]:
    """Leaves of nested lists, tuples, dicts and registered classes, in order."""
    return _pytree.tree_leaves(value)


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a nested value, and a hashable description of the nesting."""
    return _pytree.tree_flatten(value, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    """A shape is a value, and no tuple that would be made anew."""
    return isinstance(value, torch.Size)


def tree_unflatten(leaves: list[Any], nesting: Any) -> Any:
    """Inverse of `tree_flatten`."""
    return _pytree.tree_unflatten(leaves, nesting)


def tree_children(value: Any) -> list[Any] | None:
    """What a container holds, one level down, in `tree_flatten`'s order; None for a leaf."""
    children, nesting = _pytree.tree_flatten(value, is_leaf=lambda v: v is not value or _is_size(v))
    return None if nesting.is_leaf() else children


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written. Raises RuntimeError for one of inference mode, which does not count."""
    return int(tensor._version)
