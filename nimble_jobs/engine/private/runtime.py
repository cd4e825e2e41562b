"""Private names around torch as a whole: its version, its compiler's memory, its device libraries."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from nimble_jobs.engine.private.modes import modes_off

TESTED = ("2.11",)

_CYCLES_PER_US = 2000  # no GPU's clock is much faster


def tested_version() -> str | None:
    """None if this torch was tested, else a sentence for the user."""
    if torch.__version__.startswith(TESTED):
        return None
    return f"torch {torch.__version__} was not tested with this version; tested: {', '.join(TESTED)}"


def random_state(device: torch.device) -> bytes:
    """The state of a device's default generator."""
    with modes_off():
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()
        return bytes(state.numpy().tobytes())


def set_cudnn(enabled: bool) -> None:
    """Switch cuDNN on or off for the process, also after `torch.backends.disable_global_flags`.

    The context manager that torch offers for this writes every switch of cuDNN, under names that may be apart.
    """
    torch._C._set_cudnn_enabled(enabled)


def clear_workspaces() -> None:
    """Let go of the memory that matrix products keep for every stream they ever ran on."""
    torch._C._cuda_clearCublasWorkspaces()


def forget_capture(device: torch.device, pool: Any) -> None:
    """Tell torch's allocator that a capture into `pool`, a `graph_pool_handle`, is over although it could not be ended.

    Otherwise the allocator treats the capture as running for the rest of the process: it never frees memory that
    several streams have used, and destroying a `torch.cuda.MemPool` aborts the process. Does nothing if the capture
    has ended.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    except RuntimeError:
        return
    torch._C._cuda_releasePool(device.index or 0, pool)


def keep_busy(micros: float, device: torch.device) -> None:
    """Have the current stream of a GPU spin for at least about so long."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(micros * _CYCLES_PER_US))


def launch_kernel(
    function: int,
    grid: tuple[int, int, int],
    warps: int,
    shared_bytes: int,
    arg_types: str,
    args: tuple[Any, ...],
    stream: int,
) -> None:
    """Launch a function of the CUDA driver on a stream, with tensors as pointers."""
    launcher: Any = torch._C._StaticCudaLauncher  # missing from builds without CUDA
    launcher._launch_kernel(function, *grid, warps, shared_bytes, arg_types, args, stream)


def forget_compiled() -> None:
    """Resets torch.compile's caches. Whatever was compiled in this process is compiled again when it is called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this imports: all of Inductor, the first time
        torch._dynamo.reset()


def may_have_compiled() -> bool:
    """Whether Inductor is loaded, without which nothing was compiled. `forget_compiled` itself imports all of it."""
    return "torch._inductor.compile_fx" in sys.modules


def cuda_driver() -> str:
    """The newest CUDA version that the installed driver supports, as in 13000."""
    return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]  # missing from its stubs


def deterministic(mode: bool, *, warn_only: bool) -> None:
    """`torch.use_deterministic_algorithms`, which also loads Inductor and has it choose kernels without measuring."""
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)
