"""Compiled kernels that no longer need a compiler: machine code, and how to launch it.

Inductor makes them while a program is recorded. They are stored beside the schedule and loaded from there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from nimble_jobs.engine.cuda_driver import load_function
from nimble_jobs.engine.private.runtime import launch_kernel
from nimble_jobs.errors import EngineError
from nimble_jobs.schedule import CompiledKernel


@dataclass(frozen=True, kw_only=True)
class StaticKernel:
    """One kernel with a fixed grid. To call it with its arguments launches it on the current stream."""

    name: str
    function: str  # name in the binary
    binary: bytes
    grid: tuple[int, int, int]  # blocks
    warps: int  # per block
    shared_bytes: int  # per block
    arg_types: str  # a letter for each parameter, in the code of torch's launcher; O is a pointer
    scratch_bytes: int = 0  # of device memory per block, while it runs
    write_only: set[int] = field(default_factory=set)  # positions of arguments that it only writes
    updated: set[int] = field(default_factory=set)  # positions of arguments that it reads and writes

    @cached_property
    def identity(self) -> str:
        """Equal for kernels that do the same."""
        launch = (self.function, self.grid, self.warps, self.shared_bytes, self.arg_types)
        return hashlib.sha256(repr(launch).encode() + self.binary).hexdigest()

    @cached_property
    def _handles(self) -> dict[int, int]:
        return {}

    def __call__(self, *args: Any) -> None:
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        if device.index not in self._handles:
            self._handles[device.index] = load_function(self.binary, self.function, self.shared_bytes, device)
        scratch: list[torch.Tensor | None] = [None] * (len(self.arg_types) - len(args))  # few kernels use it
        if self.scratch_bytes:  # later kernels of this stream may have it as soon as this one has ended
            scratch[0] = torch.empty(math.prod(self.grid) * self.scratch_bytes, dtype=torch.uint8, device=device)
        launch_kernel(
            self._handles[device.index],
            self.grid,
            self.warps,
            self.shared_bytes,
            self.arg_types,
            (*args, *scratch),
            torch.cuda.current_stream(device).cuda_stream,
        )


def pack(kernels: Mapping[str, object]) -> tuple[tuple[CompiledKernel, ...], bytes] | None:
    """Descriptions of all kernels, and their binaries in one piece; None if a kernel needs its compiler."""
    described, pieces, end = [], [], 0
    starts: dict[bytes, int] = {}  # kernels that differ in sizes only share their machine code
    for name, kernel in sorted(kernels.items()):
        if not isinstance(kernel, StaticKernel):
            return None
        described.append(
            CompiledKernel(
                name=name,
                function=kernel.function,
                grid=kernel.grid,
                warps=kernel.warps,
                shared_bytes=kernel.shared_bytes,
                arg_types=kernel.arg_types,
                scratch_bytes=kernel.scratch_bytes,
                start=starts.setdefault(kernel.binary, end),
                nbytes=len(kernel.binary),
            )
        )
        if starts[kernel.binary] == end:
            pieces.append(kernel.binary)
            end += len(kernel.binary)
    return tuple(described), b"".join(pieces)


def unpack(described: Iterable[CompiledKernel], binaries: bytes) -> dict[str, StaticKernel]:
    """Inverse of `pack`. Raises EngineError if the descriptions do not fit the bytes."""
    found = {}
    for kernel in described:
        if not 0 <= kernel.start <= kernel.start + kernel.nbytes <= len(binaries):
            raise EngineError(f"the stored binaries are too short for the kernel {kernel.name}")
        found[kernel.name] = StaticKernel(
            name=kernel.name,
            function=kernel.function,
            binary=binaries[kernel.start : kernel.start + kernel.nbytes],
            grid=kernel.grid,
            warps=kernel.warps,
            shared_bytes=kernel.shared_bytes,
            arg_types=kernel.arg_types,
            scratch_bytes=kernel.scratch_bytes,
        )
    return found
