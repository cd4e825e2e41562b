"""Device memory, measured alike for every system: what torch's allocator has reserved beyond weights and inputs.

Reserved bytes count the private pools of CUDA graphs, which stay taken between replays, and not only live tensors. The
baseline is taken after unused blocks were returned. Runtimes with allocators of their own are measured by the free
memory of the device instead, which also sees the code of their kernels.
"""

from __future__ import annotations

import gc

import torch

from nimble_jobs.engine.private.runtime import clear_workspaces


class Meter:
    """Memory of one system at a time. On a CPU every figure is None."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._baseline = 0
        self._baseline_used = 0

    def start(self) -> None:
        """Take the baseline: nothing of the system exists yet."""
        if self._device is None:
            return
        tidy(self._device)
        self._baseline = torch.cuda.memory_reserved(self._device)
        self._baseline_used = self._used()
        torch.cuda.reset_peak_memory_stats(self._device)

    def built(self) -> int | None:
        """Peak while preparing."""
        if self._device is None:
            return None
        return max(0, torch.cuda.max_memory_reserved(self._device) - self._baseline)

    def settle(self) -> None:
        """What follows counts as running."""
        if self._device is None:
            return
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def running(self, *, own_allocator: bool = False) -> int | None:
        """Peak since `settle`."""
        if self._device is None:
            return None
        if own_allocator:
            return max(0, self._used() - self._baseline_used)
        return max(0, torch.cuda.max_memory_reserved(self._device) - self._baseline)

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def tidy(device: torch.device) -> None:
    """Return all memory that nothing uses, workspaces of libraries included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear_workspaces()
        torch.cuda.empty_cache()
