"""Dicts among the arguments whose keys come in another order than the example's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import NimbleError
from nimble_jobs.nimble.signature import Args, Kwargs, Signature

_CLOSE = 1e-6  # of the same sums, added in another order


def order_is_free(module: nn.Module, signature: Signature, example: Mapping[str, torch.Tensor]) -> bool:
    """Whether a call gives the same outputs, in the same order, with the keys of every dict among its arguments
    reversed. Calls the module twice; the caller puts its state back.
    """

    def call(*, turned: bool) -> dict[str, torch.Tensor]:
        args, kwargs = signature.arguments(tuple(t.clone() for t in example.values()))
        if turned:
            args, kwargs = tuple(_reversed(a) for a in args), {n: _reversed(v) for n, v in kwargs.items()}
        with torch.no_grad():
            return {n: t.detach().clone() for n, t in flatten_outputs(module(*args, **kwargs)).items()}

    args, kwargs = signature.arguments(tuple(example.values()))
    if not any(_holds_dicts(value) for value in (*args, *kwargs.values())):
        return True
    try:
        one, other = call(turned=False), call(turned=True)
    except (NimbleError, RuntimeError, TypeError, ValueError, LookupError):  # it cannot take this order
        return False
    return list(one) == list(other) and all(relative_norm(other[n], one[n]) <= _CLOSE for n in one)


def in_order_of(signature: Signature, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with the keys of their dicts in a signature's order, as far as both have the same."""
    like_args, like_kwargs = signature.arguments(tuple(torch.empty(0) for _ in signature.tensors))
    if len(args) == len(like_args):
        args = tuple(_ordered(value, like) for value, like in zip(args, like_args, strict=True))
    return args, {name: _ordered(value, like_kwargs.get(name)) for name, value in kwargs.items()}


def _holds_dicts(value: Any) -> bool:
    if type(value) is dict:
        return len(value) > 1 or any(_holds_dicts(v) for v in value.values())
    return type(value) in (list, tuple) and any(_holds_dicts(v) for v in value)


def _reversed(value: Any) -> Any:
    if type(value) is dict:
        return {key: _reversed(value[key]) for key in reversed(value)}
    return type(value)(_reversed(v) for v in value) if type(value) in (list, tuple) else value


def _ordered(value: Any, like: Any) -> Any:
    if type(value) is dict and type(like) is dict and value.keys() == like.keys():
        return {key: _ordered(value[key], like[key]) for key in like}
    if type(value) in (list, tuple) and type(like) is type(value) and len(like) == len(value):
        return type(value)(_ordered(a, b) for a, b in zip(value, like, strict=True))
    return value
