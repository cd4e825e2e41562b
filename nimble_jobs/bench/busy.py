"""How much of a call the GPU is busy: the union of the intervals in which kernels and copies run.

Kernel times come from torch's profiler, the length of a call from the timing without it, because profiling slows the
host down and not the kernels. Kernels that overlap on several streams count once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from nimble_jobs.bench.runners import Runner
from nimble_jobs.engine.device import synchronize

_CALLS = 3
_GPU = torch._C._autograd.DeviceType.CUDA


@dataclass(frozen=True, kw_only=True)
class Busy:
    """How long one call keeps the device busy, and with how many kernels."""

    union_us: float
    kernels: int


def busy(runner: Runner, device: torch.device) -> Busy | None:
    """None on a CPU, or where the profiler saw no kernel."""
    if device.type != "cuda":
        return None
    with torch.no_grad():
        runner.run()
        synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(_CALLS):
                runner.run()
            synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == _GPU and not event.is_user_annotation
    ]
    if not spans:
        return None
    return Busy(union_us=union(spans) / _CALLS, kernels=round(len(spans) / _CALLS))


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Total length covered by intervals that may overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total
