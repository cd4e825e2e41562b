"""The one way in which every system is timed.

Device events around many calls, after a warm-up; the median of the samples with its quartiles. Inputs rotate: at each
call where that costs nothing, else between samples. With copies means from pinned host memory to the device, run, and
every output to pinned host memory, all of it on one stream and at each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch

from nimble_jobs.bench.runners import Runner, Tensors
from nimble_jobs.engine.device import synchronize

SAMPLES = 11
_MOST_CALLS = 200  # in one sample
_WARM_SHARE = 0.2  # of the time for one figure


@dataclass(frozen=True, kw_only=True)
class Times:
    """Microseconds a call."""

    low: float  # first quartile
    median: float
    high: float  # third quartile


def replay_times(runner: Runner, inputs: Sequence[Tensors], device: torch.device, *, budget_s: float) -> Times:
    """One call with its input and output on the device."""

    def call(turn: int) -> None:
        if runner.loads_free:
            runner.load(inputs[turn % len(inputs)])
        runner.run()

    return _times(call, lambda sample: runner.load(inputs[sample % len(inputs)]), device, budget_s)


def copy_times(runner: Runner, on_host: Sequence[Tensors], device: torch.device, *, budget_s: float) -> Times:
    """One call with its input and output on the host."""
    with torch.no_grad():  # a compiler would compile anew for gradients
        runner.load(on_host[0])
        runner.run()
    pin = device.type == "cuda"
    back = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in runner.outputs().values()]

    def call(turn: int) -> None:
        runner.load(on_host[turn % len(on_host)])
        runner.run()
        for target, output in zip(back, runner.outputs().values(), strict=True):
            target.copy_(output, non_blocking=True)

    return _times(call, lambda _: None, device, budget_s)


def _times(
    call: Callable[[int], None], before_sample: Callable[[int], None], device: torch.device, budget_s: float
) -> Times:
    with torch.no_grad():
        before_sample(0)
        call(0)
        synchronize(device)
        begin = time.perf_counter()
        warm = 0
        while warm < 3 or time.perf_counter() - begin < budget_s * _WARM_SHARE:
            call(warm)
            warm += 1
            if warm % 16 == 0:
                synchronize(device)
        synchronize(device)
        once = max((time.perf_counter() - begin) / warm, 1e-7)
        calls = max(1, min(_MOST_CALLS, int(budget_s * (1 - _WARM_SHARE) / once / SAMPLES)))
        found = []
        for sample in range(SAMPLES):
            before_sample(sample)
            synchronize(device)
            found.append(_sample(call, device, calls))
    low, middle, high = quantiles(found, n=4, method="inclusive")
    return Times(low=low, median=middle, high=high)


def _sample(call: Callable[[int], None], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for turn in range(calls):
            call(turn)
        end.record()
        synchronize(device)
        return float(start.elapsed_time(end)) * 1e3 / calls
    begin = time.perf_counter()
    for turn in range(calls):
        call(turn)
    return (time.perf_counter() - begin) * 1e6 / calls
