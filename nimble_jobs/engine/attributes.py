"""A module's attributes that are not tensors, as values that can be compared."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.engine.contents import BARE, DEPTH, NO_STATE, OWN, PLAIN, TABLES, Contents
from nimble_jobs.engine.random_states import generator_state

# The pictures of empty tables. A module has a dozen.
_EMPTY: dict[type, tuple[type, list[Any]]] = {kind: (kind, []) for kind in TABLES}
_EXACT = frozenset({type(None), bool, int, str, bytes})  # equal values look the same to a model
_SEEN = "seen"


@dataclass(frozen=True)
class _Part:
    """One part of a module. Attributes that can change in place have a picture; others are compared by identity."""

    prefix: str
    values: dict[str, Any]
    pictures: dict[str, Any]

    @classmethod
    def of(cls, prefix: str, part: nn.Module, holding: Collection[str]) -> _Part:
        values, pictures = dict(vars(part)), {}
        seen: dict[int, Any] = {}
        for name, value in values.items() if holding else ():
            if type(value) not in BARE and name not in OWN:
                picture = _picture(value, seen, DEPTH)
                if name in holding or picture == _SEEN:
                    pictures[name] = picture
        return cls(prefix, values, pictures)

    def same(self, other: _Part) -> bool:
        """Whether it certainly looks the same."""
        return (
            self.prefix == other.prefix
            and len(self.values) == len(other.values)
            and all(map(is_, self.values, other.values))
            and all(map(is_, self.values.values(), other.values.values()))
            and self.pictures == other.pictures
        )

    def by_name(self) -> dict[str, Any]:
        """The pictures of all its attributes. Those without one were immutable, or tables that held nothing."""
        found: dict[str, Any] = {}
        before = f"{self.prefix}." if self.prefix else ""
        seen: dict[int, Any] = {}
        for name, value in self.values.items():
            if name in self.pictures:
                found[f"{before}{name}"] = self.pictures[name]
            elif name not in OWN:
                empty = type(value) in TABLES and id(value) not in seen
                found[f"{before}{name}"] = _EMPTY[type(value)] if empty else _picture(value, seen, DEPTH)
                seen[id(value)] = value
        return found


class Attributes:
    """A module's attributes at one moment, without its tensors. To compare them with later ones takes little time."""

    def __init__(self, contents: Contents) -> None:
        self._parts = [_Part.of(prefix, part, [n for n, _ in holding]) for prefix, part, holding in contents.parts]

    def differing(self, later: Attributes) -> str | None:
        """The dotted name of an attribute that looks different later; None if there is none."""
        before: dict[str, Any] = {}
        now: dict[str, Any] = {}
        for one, other in zip_longest(self._parts, later._parts):
            if one is None or other is None or not one.same(other):
                before |= one.by_name() if one is not None else {}
                now |= other.by_name() if other is not None else {}
        return next((n for n in (*before, *now) if n not in before or n not in now or before[n] != now[n]), None)

    def by_name(self) -> dict[str, Any]:
        """What each attribute looked like, by dotted name, as values that can be compared."""
        return {name: picture for part in self._parts for name, picture in part.by_name().items()}


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are not tensors, by dotted name, as values that can be compared."""
    return Attributes(Contents(module)).by_name()


def _picture(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """A form of a value that equals another's form if both look the same to a model.

    `seen` keeps all visited objects alive, so that no new object can have the identity of an old one.
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if kind in TABLES and not value and id(value) not in seen:
        seen[id(value)] = value
        return _EMPTY[kind]
    if isinstance(value, PLAIN):
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, NO_STATE):
        return id(value)
    if id(value) in seen or depth == 0:
        return _SEEN
    seen[id(value)] = value
    return _picture_of_object(value, seen, depth - 1)


def _picture_of_object(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """`_picture` of what may hold other values, to `depth`."""
    state = generator_state(value)
    if state is not None:
        return repr(state)
    if isinstance(value, dict | types.MappingProxyType):
        return type(value), [(_picture(k, seen, depth), _picture(v, seen, depth)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [_picture(v, seen, depth) for v in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(v) for v in value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    inside = getattr(value, "__dict__", None)
    if inside is not None:
        return type(value), _picture(dict(inside), seen, depth)
    text = repr(value)
    return type(value), text if " at 0x" not in text else None
