"""What a call is given: named tensors, and constants that a schedule was prepared with."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.private.tensors import tree_flatten, tree_unflatten
from nimble_jobs.engine.tree import named_leaves
from nimble_jobs.errors import UsageError

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Size,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TensorSlot:
    """A tensor argument."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class ConstantSlot:
    """An argument that is no tensor: part of the schedule."""

    name: str
    kind: type
    same: Any  # equal for values that are the same to any code: NaN is NaN, and 0.0 is not -0.0
    value: Any = field(compare=False)

    def __str__(self) -> str:
        return f"the constant {self.value!r}"


Slot = TensorSlot | ConstantSlot


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Names, shapes, dtypes and devices of a call's tensors, its constants, and how they are nested."""

    slots: tuple[Slot, ...]
    nesting: Any

    @property
    def tensors(self) -> tuple[TensorSlot, ...]:
        return tuple(s for s in self.slots if isinstance(s, TensorSlot))

    @property
    def plain(self) -> bool:
        """Whether the call is nothing but tensors by position."""
        return all(isinstance(s, TensorSlot) and s.name == f"args.{i}" for i, s in enumerate(self.slots))

    def __str__(self) -> str:
        return ", ".join(f"{s.name}: {s}" for s in self.slots)

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Args, Kwargs]:
        """Positional and keyword arguments with these tensors in their places."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(s, TensorSlot) else s.value for s in self.slots]
        args, kwargs = tree_unflatten(leaves, self.nesting)
        return tuple(args), dict(kwargs)


def split(example: Any) -> tuple[Args, Kwargs]:
    """The arguments that an example stands for: a tensor, a tuple or list of positional arguments, a dict of keyword
    arguments, or a pair of both.

    Raises UsageError for anything else.
    """
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, tuple) and len(example) == 2 and isinstance(example[0], tuple | list):
        args, kwargs = example
        if isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs):
            return tuple(args), dict(kwargs)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return (), dict(example)
    raise UsageError(
        f"example: found {type(example).__name__}; expected a tensor, a tuple of arguments, a dict of keyword "
        "arguments, or a pair of both"
    )


def named_keywords(module: nn.Module) -> frozenset[str] | None:
    """The keyword arguments that reach `forward` under a name of its own, so that their order cannot matter; None if
    all do.
    """
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # compiled ones have none
        return frozenset()
    collects = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return frozenset(p.name for p in parameters) if collects else None


def read(args: Args, kwargs: Kwargs, named: frozenset[str] | None = None) -> tuple[Signature, list[torch.Tensor]]:
    """The signature of a call, and its tensors in the signature's order. `named` is what `named_keywords` says; others
    keep the order that they are given in.

    Raises UsageError for an argument that is neither a dense tensor nor a plain constant.
    """
    own = sorted(kwargs) if named is None else sorted(kwargs.keys() & named)
    whole = (args, {name: kwargs[name] for name in dict.fromkeys((*own, *kwargs))})
    leaves, nesting = tree_flatten(whole)
    names = _told_apart([name for name, _ in named_leaves({"args": whole[0], "kwargs": whole[1]})])
    slots = tuple(_slot(name, leaf) for name, leaf in zip(names, leaves, strict=True))
    return Signature(slots=slots, nesting=nesting), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def mismatch(found: Signature, prepared: list[Signature]) -> UsageError:
    """The error for a call that fits none of the prepared signatures, in terms of the nearest one."""
    problems = min((_differences(found, expected) for expected in prepared), key=len)
    others = f" ({len(prepared)} signatures are prepared; this is the nearest)" if len(prepared) > 1 else ""
    return UsageError("; ".join(problems) + others)


def _slot(name: str, leaf: Any) -> Slot:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
            raise UsageError(f"{name}: found a {type(leaf).__name__} of layout {leaf.layout}; expected a dense tensor")
        return TensorSlot(name=name, shape=tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)
    if not isinstance(leaf, PLAIN):
        raise UsageError(f"{name}: found {type(leaf).__name__}; expected a tensor or a plain constant")
    return ConstantSlot(name=name, kind=type(leaf), same=_same(leaf), value=leaf)


def _same(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    return (value.real.hex(), value.imag.hex()) if isinstance(value, complex) else value


def _told_apart(names: list[str]) -> list[str]:
    """Keys such as 1 and "1" give the same name; each further one gets a number."""
    found: dict[str, str] = {}
    for name in names:
        number, unique = 2, name
        while unique in found:
            unique, number = f"{name}#{number}", number + 1
        found[unique] = name
    return list(found)


def _differences(found: Signature, expected: Signature) -> list[str]:
    here = {s.name: s for s in found.slots}
    there = {s.name: s for s in expected.slots}
    problems = [
        f"{name}: found {here[name]}; expected {there[name]}"
        for name in there
        if name in here and here[name] != there[name]
    ]
    problems += [f"{name}: not given; expected {there[name]}" for name in there if name not in here]
    problems += [f"{name}: found {here[name]}; expected no such argument" for name in here if name not in there]
    if not problems and sorted(here) == sorted(there) and list(here) != list(there):
        return [f"the arguments come in the order {', '.join(here)}; expected {', '.join(there)}"]
    return problems or [f"the arguments are nested as {found.nesting}; expected {expected.nesting}"]
