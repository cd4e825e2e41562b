"""Times on the device: medians, after a warm-up, in microseconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median

import torch

from nimble_jobs.engine.bind import Bound
from nimble_jobs.engine.device import synchronize

_SAMPLES = 7


def time_us(call: Callable[[], object], device: torch.device, *, budget_s: float = 0.5) -> float:
    """Median time of one call, within about `budget_s` seconds."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    once = max(time.perf_counter() - start, 1e-7)
    calls = max(1, min(200, int(budget_s / once / (_SAMPLES + 1))))
    samples = max(1, min(_SAMPLES, int(budget_s / once)))
    return median(_sample(call, device, calls) for _ in range(samples))


def task_times_us(bound: Bound, device: torch.device, *, rounds: int = 3) -> list[float]:
    """Median time of each task by task index, launched one after another on one stream.

    On a GPU the time lies between two events, so a task shorter than its launch reads as long as the launch.
    """
    times: list[list[float]] = [[] for _ in bound.steps]
    for _ in range(rounds + 1):
        for position, us in enumerate(_one_round(bound, device)):
            times[position].append(us)
    by_task = [0.0] * len(bound.steps)
    for step, found in zip(bound.steps, times, strict=True):
        by_task[step.task] = median(found[1:])
    return by_task


def _one_round(bound: Bound, device: torch.device) -> list[float]:
    env = dict(bound.fixed)
    cuda = device.type == "cuda"
    marks: list[float] = []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(bound.steps) + 1)] if cuda else []
    with torch.no_grad():
        if cuda:
            events[0].record()
        for position, step in enumerate(bound.steps):
            start = time.perf_counter()
            for buffer in step.drops:
                del env[buffer]
            step.call(env)
            marks.append((time.perf_counter() - start) * 1e6)
            if cuda:
                events[position + 1].record()
    if not cuda:
        return marks
    synchronize(device)
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]


def _sample(call: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        synchronize(device)
        return float(start.elapsed_time(end)) * 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) * 1e6 / calls
