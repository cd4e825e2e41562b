"""Compiles our own Triton kernels to machine code that is launched, and stored, without Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nimble_jobs.engine.private.compilers import same_assembler
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.errors import EngineError, first_line
from nimble_jobs.schedule import View

TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}  # Triton's names of torch's types
MOST = 2**31  # elements of a tensor; the kernels count them in 32 bits


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a kernel is launched."""

    name: str  # the one that programs use
    grid: tuple[int, int, int]  # blocks
    warps: int = 4  # per block
    stages: int = 3  # of a loop whose loads run ahead


def compiled(
    function: Any,
    launch: Launch,
    capability: int,
    *,
    pointers: Mapping[str, str],
    sizes: tuple[str, ...] = (),
    constants: Mapping[str, int | float],
) -> StaticKernel:
    """Compile a kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    `pointers` give the type of each tensor by the name of its argument, in order; the last one is written and all are
    aligned to 16 bytes. `sizes` are integers that follow them. Raises EngineError if Triton cannot compile it.
    """
    same_assembler()
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(sizes, "i32")
    source = ASTSource(
        fn=function,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    try:
        made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as e:  # Triton's errors have no common base class, and its assembler raises plain ones
        raise EngineError(f"Triton cannot compile the kernel {launch.name}: {first_line(e)}") from e
    scratch = [getattr(made.metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if any(scratch[1:]):
        raise EngineError(f"Triton compiled the kernel {launch.name} with a profiler in it")
    return StaticKernel(
        name=launch.name,
        function=made.metadata.name,
        binary=made.asm["cubin"],
        grid=launch.grid,
        warps=launch.warps,
        shared_bytes=made.metadata.shared,
        arg_types="O" * len(pointers) + "i" * len(sizes) + "O" * sum(size is not None for size in scratch),
        scratch_bytes=scratch[0] or 0,  # where blocks make their tensor descriptors
        write_only={len(pointers) - 1},
    )


def capability_of(device: torch.device) -> int:
    """The compute capability of a GPU, such as 90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def lies(view: View, *, channels_last: bool) -> bool:
    """Whether the elements of a four-dimensional view lie in this order without gaps, from an aligned address."""
    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    expected = 1
    for dim in reversed(order):
        if view.shape[dim] != 1 and view.stride[dim] != expected:
            return False
        expected *= view.shape[dim]
    return aligned(view)


def aligned(view: View) -> bool:
    """Whether the view starts at a multiple of 16 bytes, so that 16 bytes can be read at once."""
    return view.offset * view.itemsize % 16 == 0


def is_dense(view: View) -> bool:
    """Whether elements lie in the order of their dimensions without gaps, from an aligned address."""
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return aligned(view)


def power_of_two(number: int) -> int:
    """The smallest one that is not below `number`."""
    return 1 << (number - 1).bit_length()
