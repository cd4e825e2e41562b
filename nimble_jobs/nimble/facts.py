"""What a call of a module may depend on, by dotted name: submodules, tensors, plain attributes, hooks, classes."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.modules import global_hooks
from nimble_jobs.engine.words import Words, layout
from nimble_jobs.nimble.signature import PLAIN
from nimble_jobs.planner.module.modes import own_mode

_CONTAINERS = (list, tuple, dict, set, frozenset)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, torch.Generator)
_DEPTH = 4  # how far plain data are nested at most
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
_HELD = ("_parameters", "_buffers", "_modules")
# Of torch's own bookkeeping: what no call depends on, or what comes and goes with the hooks.
_IGNORED = {
    *_FORWARD_HOOKS,
    *_BACKWARD_HOOKS,
    *_HELD,
    "_compiled_call_impl",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
}
_OF_CLASSES_IGNORED = {"__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__module__", "__weakref__"}

Values = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fact:
    """One thing that must stay."""

    thing: object = None  # the object that must be there; None if an equal one does as well
    attribute: str = ""  # of a module, by dotted name: the one that this belongs to
    values: Values = ()  # what else must be equal, each with its name; an empty one for the thing as a whole

    def difference(self, now: Fact) -> str | None:
        """How it is another one now, for a sentence that begins with its name; None if it is not."""
        if self.thing is not now.thing:
            return "was replaced"
        if len(self.values) != len(now.values):
            return "was changed"
        for (name, before), (_, after) in zip(self.values, now.values, strict=True):
            if type(before) is not type(after) or not _equal(before, after):
                if name == _ADDRESS:
                    return "was moved to other memory"
                words = f"was {before!r}, and is {after!r}"
                return f"was changed: its {name} {words}" if name else words
        return None


_ADDRESS = "address"


@dataclass(kw_only=True)
class Facts:
    """Everything of a module that was looked at once, and how to tell quickly that nothing was written since."""

    training: bool  # whether gradients are wanted: then training flags, `requires_grad` and backward hooks count too
    but_for: frozenset[str] = frozenset()  # attributes by dotted name that the module's own calls change
    named: dict[str, Fact] = field(default_factory=dict)

    _attribute: str = ""
    _words: Words | None = None
    _others: list[tuple[Any, Any]] = field(default_factory=list)  # containers that no words tell of, with copies
    _exact: bool = True  # whether the words tell of everything else
    _seen: dict[int, object] = field(default_factory=dict)  # keeps alive what the words are of

    @classmethod
    def of(cls, module: nn.Module, *, training: bool, but_for: frozenset[str] = frozenset()) -> Facts:
        """What there is to know now."""
        found = cls(training=training, but_for=but_for)
        where = layout()
        found._words = Words(where) if where is not None else None
        found._module("", module)
        for name, hooks in global_hooks(backward=training).items():
            found._hooks(name, hooks)
        if found._words is not None:
            found._words.seal()
        return found

    def untouched(self) -> bool:
        """Whether nothing was written since. False proves nothing."""
        if self._words is None or not self._exact or not self._words.unchanged():
            return False
        return all(container == copy for container, copy in self._others)

    def difference(self, now: Facts) -> str | None:
        """The first thing that is not as it was; None if there is none."""
        for name, fact in self.named.items():
            other = now.named.get(name)
            what = "was removed" if other is None else fact.difference(other)
            if what is not None:
                return f"{name!r} {what}"
        added = next((name for name in now.named if name not in self.named), None)
        return f"{added!r} was added" if added is not None else None

    def changed(self, now: Facts) -> set[str]:
        """Attributes of modules, by dotted name, of which anything is not as it was."""
        either = {**now.named, **self.named}
        return {
            fact.attribute
            for name, fact in either.items()
            if name not in now.named or name not in self.named or fact.difference(now.named[name]) is not None
        }

    def _add(self, name: str, thing: object = None, values: Values = ()) -> None:
        self.named[name] = Fact(thing=thing, values=values, attribute=self._attribute)

    def _first_time(self, value: object) -> bool:
        first = id(value) not in self._seen
        self._seen[id(value)] = value
        return first

    def _module(self, name: str, module: nn.Module) -> None:
        self._add(name or "the module", thing=module, values=(("class", type(module)),))
        if not self._first_time(module):
            return
        if self._words is not None:
            self._words.add_class_of(module)
        self._classes(type(module))
        attributes = vars(module)
        self._watch_dict(attributes)
        prefix = f"{name}." if name else ""
        for held in _HELD:
            entries = attributes.get(held)
            if isinstance(entries, dict):
                self._watch_dict(entries)
                self._entries(prefix, entries)
        for hooks in (*_FORWARD_HOOKS, *(_BACKWARD_HOOKS if self.training else ())):
            if hooks in attributes:
                self._hooks(f"{prefix}{hooks}", attributes[hooks])
        ignored = _IGNORED if self.training else {*_IGNORED, "training"}
        own = {"training": own_mode(module)} if "training" in attributes else {}
        entries = {**attributes, **own}
        self._entries(prefix, {key: value for key, value in entries.items() if key not in ignored})

    def _entries(self, prefix: str, entries: Mapping[Any, Any]) -> None:
        for key, value in list(entries.items()):
            if f"{prefix}{key}" not in self.but_for:
                outer, self._attribute = self._attribute, f"{prefix}{key}"
                self._value(self._attribute, value, depth=0)
                self._attribute = outer

    def _value(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN):
            self._add(name, values=(("", value),))
        elif isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, torch.Tensor):
            self._tensor(name, value)
        elif isinstance(value, _CONTAINERS) and depth < _DEPTH:
            self._container(name, value, depth)
        elif isinstance(value, _OPAQUE) or not _is_data(value, depth):
            self._add(name, thing=value)
            self._first_time(value)
        else:
            self._add(name, thing=value)
            if self._first_time(value):
                self._watch_dict(vars(value))
                for key, inner in vars(value).items():
                    self._value(f"{name}.{key}", inner, depth + 1)

    def _container(self, name: str, value: Any, depth: int) -> None:
        self._add(name, values=(("type", type(value)), ("length", len(value))))
        if not self._first_time(value):
            return
        if isinstance(value, dict):
            self._watch_dict(value)
            inner = list(value.items())
        elif isinstance(value, set | frozenset):
            self._others.append((value, set(value)))
            self._add(f"{name}, elements", values=(("", frozenset(value)),))
            return
        else:
            inner = list(enumerate(value))
            if self._words is not None and isinstance(value, list):
                self._words.add_list(value)
        for key, element in inner:
            self._value(f"{name}.{key}", element, depth + 1)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        facts: list[tuple[str, Any]] = [("dtype", tensor.dtype), ("device", tensor.device)]
        facts.append(("layout", tensor.layout))
        dense = is_dense(tensor)
        if dense:
            facts += [("shape", tuple(tensor.shape)), ("strides", tensor.stride()), ("offset", tensor.storage_offset())]
            facts += [("conjugate bit", tensor.is_conj()), ("negative bit", tensor.is_neg())]
            facts.append((_ADDRESS, tensor.data_ptr()))
        if self.training:
            facts.append(("requires_grad", tensor.requires_grad))
        self._add(name, thing=tensor, values=tuple(facts))
        if self._first_time(tensor) and self._words is not None:
            watched = dense and self._words.add_tensor(tensor, training=self.training)
            self._exact = self._exact and watched

    def _hooks(self, name: str, hooks: dict[int, Any]) -> None:
        self._watch_dict(hooks)
        self._seen[id(hooks)] = hooks
        for number, hook in hooks.items():
            self._add(f"{name}.{number}", thing=hook)

    def _classes(self, of: type) -> None:
        for cls in of.__mro__:
            if cls is object or not self._first_time(cls):
                continue
            self._watch_dict(vars(cls))
            for key, value in vars(cls).items():
                if key not in _OF_CLASSES_IGNORED:
                    plain = isinstance(value, PLAIN)
                    name = f"{cls.__module__}.{cls.__qualname__}.{key}"
                    self._add(name, None if plain else value, (("", value),) if plain else ())

    def _watch_dict(self, value: Mapping[Any, Any]) -> None:
        self._seen[id(value)] = value
        if self._words is not None:
            self._words.add_dict(value)


def _is_data(value: object, depth: int) -> bool:
    """Whether an object is nothing but plain data by name, as configurations are."""
    if depth >= _DEPTH or type(value).__module__ == "builtins" or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, argparse.Namespace | types.SimpleNamespace) or dataclasses.is_dataclass(value):
        return True
    return all(_plain(inner, depth + 1) for inner in vars(value).values())


def _plain(value: object, depth: int) -> bool:
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, _CONTAINERS):
        return depth < _DEPTH and all(_plain(inner, depth + 1) for inner in _inner(value))
    return not isinstance(value, _OPAQUE) and _is_data(value, depth)


def _inner(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)


def _equal(before: Any, after: Any) -> bool:
    both_nan = isinstance(before, float) and isinstance(after, float) and math.isnan(before) and math.isnan(after)
    return both_nan or bool(before == after)
