"""Names for values in nested containers: keys, field names and positions from the outside in, joined by dots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nimble_jobs.engine.private.tensors import tree_children


def named_leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every leaf of a nested value with its name, in the order of `private.tensors.tree_flatten`."""
    children = tree_children(value)
    if children is None:
        return [(path, value)]
    keys = _keys(value, len(children))
    return [
        leaf
        for key, child in zip(keys, children, strict=True)
        for leaf in named_leaves(child, f"{path}.{key}" if path else key)
    ]


def opened(value: Any) -> Any:
    """The same value with a dict in place of each dataclass that torch does not know; only lists, tuples and dicts are
    searched.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and tree_children(value) is None:
        return {f.name: opened(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if type(value) in (list, tuple):
        return type(value)(opened(item) for item in value)
    if type(value) is dict:
        return {key: opened(item) for key, item in value.items()}
    return value


def has_own_names(value: Any) -> bool:
    """Whether a value is a container whose entries have names instead of positions."""
    return isinstance(value, Mapping) or hasattr(value, "_fields") or dataclasses.is_dataclass(value)


def _keys(value: Any, count: int) -> list[str]:
    keys: list[str] = []
    if isinstance(value, Mapping):
        keys = [str(key) for key in value]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        keys = list(value._fields)
    elif dataclasses.is_dataclass(value):
        keys = [f.name for f in dataclasses.fields(value)]
    return keys if len(keys) == count else [str(i) for i in range(count)]
