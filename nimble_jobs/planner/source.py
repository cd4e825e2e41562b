"""Where a program's tasks come from: which kernels, over which memory layout of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from nimble_jobs.engine.inductor import compile_module
from nimble_jobs.engine.record import Recording, record, record_compiled, state_of
from nimble_jobs.errors import CannotRecord

Kernels = Literal["eager", "inductor", "max-autotune"]
Layout = Literal["given", "channels-last"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One way to turn a module into tasks."""

    kernels: Kernels
    layout: Layout

    @property
    def name(self) -> str:
        """As candidates are called."""
        words = {"eager": "eager kernels", "inductor": "inductor kernels", "max-autotune": "max-autotune kernels"}
        return words[self.kernels] + (", channels-last" if self.layout == "channels-last" else "")


class Layouts:
    """Lets the four-dimensional weights of a module be laid out in another way, and back again exactly."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = [t for t in (*module.parameters(), *module.buffers()) if t.dim() == 4 and t.is_floating_point()]
        self._given = [t.data for t in self._tensors]

    @property
    def differ(self) -> bool:
        """Whether there is anything to lay out."""
        return bool(self._tensors)

    def use(self, layout: Layout) -> None:
        """Lay the weights out; no value changes."""
        for tensor, given in zip(self._tensors, self._given, strict=True):
            channels_last = layout == "channels-last"
            tensor.data = given.contiguous(memory_format=torch.channels_last) if channels_last else given


def record_source(
    module: nn.Module,
    source: Source,
    inputs: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    compiled_before: bool = False,
) -> Recording:
    """Record a module whose weights lie in the source's layout. Inputs are laid out alike.

    Raises CannotRecord where the module does what no schedule can hold.
    """
    example = {name: _laid_out(tensor, source.layout) for name, tensor in inputs.items()}
    state = state_of(module)
    if source.kernels == "eager":
        recording = record(module, example, state, device, module)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice from compilers to their own users
            call = compile_module(
                module, max_autotune=source.kernels == "max-autotune", compiled_before=compiled_before
            )
            recording = record_compiled(call, example, state, device)
    if any(t.random for t in recording.program.tasks):
        place = next(t.source for t in recording.program.tasks if t.random)
        raise CannotRecord(f"the model draws random numbers at {place}; its replays could not be checked")
    return recording


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout == "channels-last" and tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
