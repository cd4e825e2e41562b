"""How a model with several inputs is called: which of its arguments is which, and how they are nested."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nimble_jobs.errors import ModelError

TAKES = "takes_arguments"  # an attribute of exported programs: positional and named arguments, with dtypes as leaves


@dataclass(frozen=True)
class Leaf:
    """A place of a call's arguments."""

    path: str  # of the value that belongs there
    dtype: torch.dtype | None = None  # what it must have; None: what it has


@dataclass(frozen=True)
class Call:
    """A call's arguments, nested in lists, tuples and dicts, with `Leaf` in place of each tensor."""

    positional: Sequence[Any]
    named: Mapping[str, Any]

    @classmethod
    def of_paths(cls, paths: Sequence[str]) -> Call:
        """Arguments as dotted paths say. Entries with positions make a list, others a dict."""
        tree: dict[str, Any] = {}
        for path in paths:
            *outer, last = path.split(".")
            inside = tree
            for name in outer:
                inside = inside.setdefault(name, {})
            inside[last] = Leaf(path)
        made = {name: _listed(value) for name, value in tree.items()}
        count = sum(name.isdigit() for name in made)
        return cls([made.pop(str(i)) for i in range(count)], made)

    def filled(self, arguments: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments, with tensors by path."""
        return (
            [_filled(value, arguments) for value in self.positional],
            {name: _filled(value, arguments) for name, value in self.named.items()},
        )


def call_of(model: nn.Module, paths: Sequence[str]) -> Call:
    """How a model is called with arguments of these paths. Raises ModelError if it cannot be.

    Models whose code does not say what they take are not checked.
    """
    signature = signature_of(model)
    if signature is not None:
        _check(signature, paths)
    takes = getattr(model, TAKES, None)
    return Call.of_paths(paths) if takes is None else _as_exported(takes, signature, paths)


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = {name: _listed(entry) for name, entry in value.items()}
    return [made[str(i)] for i in range(len(made))] if next(iter(made)).isdigit() else made


def _filled(value: Any, arguments: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, Leaf):
        tensor = arguments[value.path]
        return tensor if value.dtype is None else tensor.to(value.dtype)
    if isinstance(value, Mapping):
        return {name: _filled(entry, arguments) for name, entry in value.items()}
    made = [_filled(entry, arguments) for entry in value]
    return tuple(made) if isinstance(value, tuple) else made


def _as_exported(
    takes: tuple[Sequence[Any], Mapping[str, Any]], signature: inspect.Signature | None, paths: Sequence[str]
) -> Call:
    """The call that a program was exported with: it takes no other nesting. Raises ModelError."""
    positional, named = takes
    names = list(signature.parameters)[: len(positional)] if signature is not None else []
    wanted = dict(paths_of({**dict(zip(names, positional, strict=False)), **named}))
    # An argument may be named by its position, too.
    given = {_by_name(path, names): path for path in paths}
    missing = [path for path in wanted if path not in given]
    unknown = [given[path] for path in given if path not in wanted]
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which it does not take"
        raise ModelError(f"input.fields.x: {what}; the program was exported with: {', '.join(wanted)}")

    def leaves(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {name: leaves(entry, f"{path}.{name}") for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(leaves(entry, f"{path}.{i}") for i, entry in enumerate(value))
        return Leaf(given[path], value)

    return Call(
        [leaves(value, name) for name, value in zip(names, positional, strict=True)],
        {name: leaves(value, name) for name, value in named.items()},
    )


def _by_name(path: str, names: Sequence[str]) -> str:
    first, dot, rest = path.partition(".")
    return f"{names[int(first)]}{dot}{rest}" if first.isdigit() and int(first) < len(names) else path


def paths_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested arguments with their paths."""
    if isinstance(value, Mapping):
        entries: Any = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for name, entry in entries:
        yield from paths_of(entry, f"{path}.{name}" if path else str(name))


def _check(signature: inspect.Signature, paths: Sequence[str]) -> None:
    """Raises ModelError unless the first names of the paths are arguments, and all that are required are there."""
    first = list(dict.fromkeys(path.split(".")[0] for path in paths))
    names = [name for name in first if not name.isdigit()]
    takes = signature.parameters.values()
    known = [p.name for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    open_names = any(p.kind is p.VAR_KEYWORD for p in takes)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None and not open_names:
        raise ModelError(f"input.fields.x.{unknown}: no such argument; the model takes: {_said(takes)}")
    try:
        signature.bind(*[None] * (len(first) - len(names)), **dict.fromkeys(names))
    except TypeError as e:
        raise ModelError(
            f"input.fields.x: the model cannot be called with these arguments: {e}; it takes: {_said(takes)}"
        ) from e


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """What the model's forward takes; None if its code does not say."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def _said(parameters: Any) -> str:
    said = [
        p.name + (" (required)" if p.default is p.empty else "")
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return ", ".join(said) or "nothing"
