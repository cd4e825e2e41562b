"""Preparing runs the model many times; afterwards the process is as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.modules import buffers_of, parameters_of
from nimble_jobs.engine.private.runtime import forget_compiled, may_have_compiled
from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.engine.state import Snapshot
from nimble_jobs.errors import CannotRecord, EngineError


@contextlib.contextmanager
def restoring_state(module: nn.Module, device: torch.device) -> Iterator[Snapshot]:
    """Whatever runs inside, tensors, attributes and what they contain, random states and compilers are then as before.

    Parameters are put back if calls are made under the `watching` mode of the snapshot. The memory layout of weights
    and buffers is restored if an error leaves the block, and left as chosen otherwise. What a model keeps outside of
    itself cannot be restored. Raises CannotRecord if a tensor has another shape then.
    """
    snapshot, states = Snapshot(module), RandomStates(device)
    laid_out = [(t, t.data) for t in (*module.parameters(), *module.buffers()) if is_dense(t)]
    try:
        yield snapshot
    except BaseException:
        for tensor, data in laid_out:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
        raise
    else:
        grown = snapshot.resized()
    finally:
        snapshot.put_back()
        states.put_back()
        if may_have_compiled():  # compilers keep what they compiled, and with it the module
            forget_compiled()
    if grown is not None:
        raise CannotRecord(f"the model changes the shape of its tensor {grown!r} at its first call")


@dataclass(frozen=True)
class Places:
    """Where the tensors lay that a captured schedule reads."""

    tensors: tuple[tuple[str, dict[str, Any], str, torch.Tensor, int], ...]  # name, holder, key, tensor, address

    @classmethod
    def of(cls, module: nn.Module, names: set[str]) -> Places:
        """The places of a module's parameters, buffers and attributes with these dotted names."""
        found: dict[str, tuple[str, dict[str, Any], str, torch.Tensor, int]] = {}
        for prefix, child in module.named_modules():
            holders: tuple[dict[str, Any], ...] = (parameters_of(child), buffers_of(child), vars(child))
            for holder in holders:
                for key, tensor in holder.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if name in names and isinstance(tensor, torch.Tensor):
                        found[name] = (name, holder, key, tensor, tensor.data_ptr())
        return cls(tuple(found.values()))

    def check(self) -> None:
        """Raises EngineError, naming the tensor, if one was replaced or moved: replays would read the old one."""
        for name, holder, key, tensor, address in self.tensors:
            if holder.get(key) is not tensor or tensor.data_ptr() != address:
                raise EngineError(
                    f"the module's tensor {name!r} was moved or replaced after it was prepared; "
                    "change weights in place, or prepare again"
                )
