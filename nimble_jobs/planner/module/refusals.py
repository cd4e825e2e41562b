"""Refuses what a module does that no replay could repeat: in steps that are watched, in hooks, while it is prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from nimble_jobs.engine.attributes import Attributes
from nimble_jobs.engine.contents import Contents
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.observe import refuse_advance, refuse_modes, refuse_random
from nimble_jobs.engine.private.modules import backward_hooks
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.engine.private.tensors import gradient_hooks
from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.engine.state import Snapshot
from nimble_jobs.errors import CannotRecord, DeviceFault, NimbleError, first_line

_STEPS = 2  # after the first, which may set up what all later ones use

Result = TypeVar("Result")


def watched(snapshot: Snapshot, call: Callable[[], Result]) -> Result:
    """What a call gives. The snapshot keeps the values of parameters that it writes into.

    Raises what the call raises, also if nobody watches.
    """
    try:
        with snapshot.watching():
            return call()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - it may be the mode that the model cannot stand; its own is raised again
        snapshot.put_back()
        forget_compiled()
        return call()


def watch_steps(module: nn.Module, step: Callable[[], object], device: torch.device) -> dict[str, torch.Tensor]:
    """Take a few steps, and return the tensors of the module, by name, that they change.

    Values and random states are afterwards as before. Raises CannotRecord for attributes and modes that steps change,
    and for random numbers that are not torch's; what a step raises comes through.
    """
    snapshot, states = Snapshot(module), RandomStates(device)
    modes = {name: m.training for name, m in module.named_modules()}
    try:
        watched(snapshot, step)
        refuse_random(states)
        refuse_modes(modes, module)
        changing = snapshot.changing()
        kept = Attributes(Contents(module))
        for _ in range(_STEPS):
            step()
            refuse_advance(kept, Attributes(Contents(module)))
            refuse_random(states)
            changing |= snapshot.changing()
        return changing
    finally:
        snapshot.put_back_values()
        states.put_back()


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


@contextlib.contextmanager
def refusing_to_prepare(device: torch.device, again: Callable[[], object]) -> Iterator[None]:
    """Wrap the preparation of a model. If the block fails, run `again`, a step in eager.

    If `again` works, the preparation is to blame: raises CannotRecord. If it fails too, its error is raised. Errors of
    our own and of too little memory pass unchanged. Raises DeviceFault if the device no longer responds.
    """
    try:
        yield
    except (NimbleError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        try:
            synchronize(device)
        except RuntimeError as fault:
            raise DeviceFault(f"{first_line(e)}; the device no longer responds: {fault}") from e
        again()
        raise CannotRecord(f"the model fails while it is prepared: {first_line(e)}") from e
