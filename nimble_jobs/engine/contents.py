"""What a module consists of: its parts, their tensors, and whatever else can be found in their attributes."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.engine.private.modules import buffers_of, parameters_of, walk
from nimble_jobs.engine.random_states import generator_state

PLAIN = (type(None), bool, int, float, complex, str, bytes)
NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, nn.Module)
OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})  # a module's own tables
TABLES = frozenset({dict, OrderedDict, set})
DEPTH = 8  # levels of nested containers and objects that are searched
_LEAVES = (*PLAIN, *NO_STATE, np.ndarray)
BARE = frozenset(_LEAVES) - {np.ndarray, nn.Module}  # exact types of what holds nothing
_TENSOR_OR_LEAF = (*_LEAVES, torch.Tensor)


class Contents:
    """A walk over a module: its parts, and what their attributes hold. Once something may have changed the module, only
    a new walk tells.

    Most attributes are flags, sizes, and tables of no hooks. Nothing can be found in them.
    """

    def __init__(self, module: nn.Module) -> None:
        # Parts by name, each with the attributes that may hold something.
        self.parts: list[tuple[str, nn.Module, list[tuple[str, Any]]]] = []
        self.empty: list[Any] = []  # tables that hold nothing
        for prefix, part in walk(module):
            holding: list[tuple[str, Any]] = []
            for name, value in vars(part).items():
                kind = type(value)
                if kind in BARE:
                    continue
                if kind in TABLES and not value and (kind is not OrderedDict or not value.__dict__):
                    self.empty.append(value)
                elif name not in OWN and not (kind is tuple and BARE.issuperset(map(type, value))):
                    holding.append((name, value))
            self.parts.append((prefix, part, holding))

    def state(self) -> dict[str, torch.Tensor]:
        """What `state_of` returns."""
        found: dict[str, torch.Tensor] = {}
        for prefix, part, holding in self.parts:
            own = {**parameters_of(part), **buffers_of(part)}
            if not own and not holding:
                continue
            before, attributes = f"{prefix}." if prefix else "", vars(part)
            for name, tensor in own.items():
                if tensor is not None and name not in attributes:  # an attribute hides a tensor of its name
                    found.setdefault(f"{before}{name}", tensor)
            for name, value in holding:
                if isinstance(value, torch.Tensor):
                    found.setdefault(f"{before}{name}", value)
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """What `tensors_in` returns."""
        found = self.state()
        waiting = [(f"{p}.{n}" if p else n, v, DEPTH) for p, _, holding in self.parts for n, v in holding]
        seen: set[int] = set()
        while waiting:
            name, value, depth = waiting.pop()
            if _holds_nothing(value):
                continue
            if isinstance(value, torch.Tensor):
                found.setdefault(name, value)
                continue
            if isinstance(value, _LEAVES) or id(value) in seen or depth == 0:
                continue
            seen.add(id(value))
            inside = getattr(value, "__dict__", None)
            if type(inside) is dict:
                waiting += [(f"{name}.{k}", v, depth - 1) for k, v in inside.items()]
            if isinstance(value, dict | types.MappingProxyType):
                waiting += [(f"{name}[{k!r}]", v, depth - 1) for k, v in value.items()]
            elif isinstance(value, list | tuple | deque):
                waiting += [(f"{name}[{i}]", v, depth - 1) for i, v in enumerate(value)]
        return found

    def identities(self) -> dict[str, int]:
        """The identity of each of these tensors, by name."""
        return {name: id(tensor) for name, tensor in self.tensors().items()}

    def containers(self) -> list[Any]:
        """Lists, dicts, sets and tables of attributes that can be reached, without those in `empty`."""
        found: dict[int, Any] = {}
        waiting = [(value, DEPTH) for _, _, holding in self.parts for _, value in holding]
        seen: set[int] = set()
        while waiting:
            value, depth = waiting.pop()
            if _holds_nothing(value):
                if type(value) in TABLES:
                    found[id(value)] = value
                if type(value) is OrderedDict:  # a call may give it attributes
                    found[id(value.__dict__)] = value.__dict__
                continue
            if isinstance(value, _TENSOR_OR_LEAF) or id(value) in seen or depth == 0:
                continue
            seen.add(id(value))
            inside = getattr(value, "__dict__", None)
            if type(inside) is dict:
                waiting.append((inside, depth))
            if isinstance(value, dict | list | set | deque):
                found[id(value)] = value
            if isinstance(value, dict | types.MappingProxyType):
                waiting += [(v, depth - 1) for v in value.values()]
            elif isinstance(value, list | tuple | set | frozenset | deque):
                waiting += [(v, depth - 1) for v in value]
        return list(found.values())

    def generators(self) -> Iterator[tuple[Any, Any]]:
        """Random generators among the attributes, each with its state."""
        for _, _, holding in self.parts:
            for _, value in holding:
                if (state := generator_state(value)) is not None:
                    yield value, state


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain tensor attributes of a module by dotted name. Aliases have the first name only."""
    return Contents(module).state()


def tensors_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """`state_of`, plus the tensors in a module's containers and objects, named by their place."""
    return Contents(module).tensors()


def _holds_nothing(value: Any) -> bool:
    kind = type(value)
    if kind in TABLES:
        return not value and (kind is not OrderedDict or not value.__dict__)
    return kind in BARE
