"""Hooks of autograd: those that it runs itself whenever a gradient arrives, and those that no schedule can hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nimble_jobs.engine.private import backward_hooks, gradient_hooks
from nimble_jobs.errors import CannotRecord


@contextlib.contextmanager
def gradient_hooks_off(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While inside, hooks on the gradients of these tensors do not run; afterwards each has the hooks that it had."""
    tensors = list(tensors)
    before = [[dict(hooks) for hooks in gradient_hooks(t)] for t in tensors]
    for hooks in _tables(tensors):
        hooks.clear()
    try:
        yield
    finally:
        for tensor, kept in zip(tensors, before, strict=True):
            for i, hooks in enumerate(gradient_hooks(tensor)):
                hooks.clear()
                hooks.update(kept[i] if i < len(kept) else {})


def refuse_backward_hooks(module: nn.Module) -> None:
    """Raises CannotRecord, naming the submodule, for hooks on a module's backward pass."""
    for name, child in module.named_modules():
        if backward_hooks(child):
            raise CannotRecord(
                f"the module {name or type(child).__name__!r} has backward hooks, which a replay would not call; "
                "remove them before prepare, or train in eager"
            )


def refuse_gradient_hooks(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises CannotRecord, naming the parameter, for hooks on gradients of named parameters."""
    for name, parameter in parameters:
        if any(gradient_hooks(parameter)):
            raise CannotRecord(f"the parameter {name!r} has hooks on its gradient, which a replay would not call")


def _tables(tensors: list[torch.Tensor]) -> list[dict[int, object]]:
    return [hooks for t in tensors for hooks in gradient_hooks(t)]
