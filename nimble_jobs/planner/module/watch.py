"""Training steps in eager, watched from outside before anything is recorded: what no replay could repeat is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from nimble_jobs.engine.observe import refuse_advance, refuse_modes, refuse_random
from nimble_jobs.engine.private import forget_compiled
from nimble_jobs.engine.state import RandomStates, Snapshot, attributes

_STEPS = 2  # after the first, which may set up what all later ones use

Result = TypeVar("Result")


def watched(snapshot: Snapshot, call: Callable[[], Result]) -> Result:
    """What a call gives. The snapshot keeps the values of parameters that it writes into.

    Raises what the call raises, also where nobody watches.
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
        kept = attributes(module)
        for _ in range(_STEPS):
            step()
            refuse_advance(kept, attributes(module))
            refuse_random(states)
            changing |= snapshot.changing()
        return changing
    finally:
        snapshot.put_back_values()
        states.put_back()
