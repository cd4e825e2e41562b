"""Our own kernels in a recording: each takes the place of an operator that a pass put into the compiler's graph."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.engine.recorder import Recording
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.schedule import Arg, Task


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A kernel and its arguments. It writes the output, which lies between `given` and `sizes`, and nothing else."""

    kernel: StaticKernel
    given: tuple[Arg, ...]  # before the output
    sizes: tuple[int, ...] = ()  # after it


def put_in_place(
    recording: Recording, device: torch.device, kernel_of: Callable[[Task, torch.device], Launched | None]
) -> Recording:
    """The recording with a kernel for each task that has one; a task for which `kernel_of` gives None stays.

    Raises what `kernel_of` raises: EngineError if Triton cannot compile one.
    """
    if not able(device).kernels:
        return recording
    kernels = dict(recording.kernels)
    tasks = []
    for task in recording.program.tasks:
        ours = kernel_of(task, device)
        if ours is not None:
            kernels[ours.kernel.name] = ours.kernel
            out: Any = task.outputs
            args = (*ours.given, out, *ours.sizes)
            task = replace(task, op=ours.kernel.name, args=args, outputs=None, writes=(out,), mutates=(out,))
        tasks.append(task)
    return replace(recording, program=replace(recording.program, tasks=tuple(tasks)), kernels=kernels)


def tile_in(names: Collection[str], tiles: Collection[str] | None = None) -> Callable[[Any, torch.device], str | None]:
    """With which tile a shape is computed by kernels of these names; None if by none of them.

    A shape has `tiles` that can be tried, and the `name` of its kernel with each. `tiles`: all that the kernel
    supports, if an earlier build may have chosen one that would not be tried now.
    """
    return lambda shape, _: next((tile for tile in tiles or shape.tiles if shape.name(tile) in names), None)


@functools.cache
def digest_of(*modules: str) -> str:
    """SHA-256 of the source of modules beside this one: what kernels compute, and how they are launched."""
    sources = [Path(__file__).with_name(f"{module}.py").read_bytes() for module in modules]
    return hashlib.sha256(b"".join(sources)).hexdigest()
