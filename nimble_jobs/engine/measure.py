"""Measures times on the device: medians after a warm-up, in microseconds."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from statistics import median
from typing import Any

import torch

from nimble_jobs.engine.bind import Bound
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.captures import UNCAPTURED, capturing
from nimble_jobs.engine.device import able, synchronize
from nimble_jobs.engine.launch import flight_streams
from nimble_jobs.engine.private.runtime import keep_busy
from nimble_jobs.engine.streams import borrowed
from nimble_jobs.errors import EngineError, UsageError, first_line

VARIABLE = "NIMBLE_JOBS_TIMING_BUDGET_S"


def budget_s(text: str | None) -> float:
    """Seconds to spend on one figure, from the text of VARIABLE; 0.5 if it is not set. Raises UsageError."""
    if not text:
        return 0.5
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{VARIABLE}: found {text!r}; expected a number of seconds above 0, such as 0.5")
    return seconds


_ASKED = os.environ.get(VARIABLE)
BUDGET_S = budget_s(_ASKED)

_CALLS = 200  # at most per sample
_SAMPLES = 7
_CPU_ROUNDS = 4  # the first one warms up
_GPU_SAMPLES = 3
_TURNS = 9  # of calls that are compared with each other
_CLOCK_RISES_S = 0.01
_ROUNDS_AHEAD = 25  # between two waits for the device
_LONGEST_SPIN_US = 100_000.0
_DISTURBED = 2  # samples with gaps after which no more are taken
_REPEATS = 20  # of a task in its graph, so that the graph's launch of a few microseconds hardly counts
_copies: ContextVar[int] = ContextVar("copies", default=1)


def figure_s(device: torch.device) -> float:
    """Seconds to spend on one figure of a device: BUDGET_S. On a GPU times vary less, so half of that is enough there,
    unless VARIABLE is set.
    """
    return BUDGET_S / 2 if able(device).graphs and not _ASKED else BUDGET_S


def time_us(
    call: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float = BUDGET_S,
    before: Callable[[], object] = lambda: None,
    most: int = _CALLS,
) -> float:
    """Median time of one call in microseconds, measured for about `budget_s` seconds.

    `before` is called before each sample and not timed. A sample has at most `most` calls.
    """
    (times,) = in_turns_us([call], device, budget_s=budget_s, before=before, most=most)
    return median(times)


def in_turns_us(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    budget_s: float = BUDGET_S,
    before: Callable[[], object] = lambda: None,
    at_least: int = 1,
    most: int = _CALLS,
) -> list[list[float]]:
    """A few samples for each of several calls, in microseconds, over about `budget_s` seconds per call.

    The calls take turns, so that whatever else the machine does affects all of them. `before` is called before each
    sample and not timed. A sample has at most `most` calls.
    """
    once: list[float] = []
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        before()
        call()
        before()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        once.append(max(time.perf_counter() - start, 1e-7))
    samples = max(at_least, min(_SAMPLES, int(budget_s / max(once))))
    for _ in range(samples):
        for call, seconds, found in zip(calls, once, times, strict=True):
            before()
            synchronize(device)
            found.append(_sample(call, device, max(1, min(most, int(budget_s / seconds / (_SAMPLES + 1))))))
    return times


def throughput_per_s(instances: Sequence[Instance], device: torch.device, *, budget_s: float = BUDGET_S) -> float:
    """Replays a second with every instance on a stream of its own, all kept busy."""
    if not able(device).streams:
        return 1e6 / time_us(instances[0].replay, device, budget_s=budget_s)
    lanes = flight_streams(device, len(instances))

    def round_robin() -> None:
        for instance, stream in zip(instances, lanes, strict=True):
            with torch.cuda.stream(stream):
                instance.replay()

    round_robin()
    synchronize(device)
    start = time.perf_counter()
    rounds = 0
    while time.perf_counter() - start < budget_s:
        for _ in range(_ROUNDS_AHEAD):
            round_robin()
        rounds += _ROUNDS_AHEAD
        synchronize(device)
    return rounds * len(instances) / (time.perf_counter() - start)


def kernels_us(call: Callable[[], object], call_us: float, device: torch.device) -> float:
    """Time of one call's kernels on a GPU, back to back, in microseconds.

    They are launched while the device is kept busy for longer than a call takes, so that no kernel waits for its
    launch. `call_us` is the ordinary time of a call. If launches took longer than the device was busy, because other
    threads delayed them or because the device's queue was full, gaps were measured too. Then the device is kept busy
    for longer the next time. The shortest sample counts, since whatever disturbs a call makes it longer.
    """
    whole: list[float] = []
    with_gaps: list[float] = []
    spin_us = 2 * call_us
    while len(whole) < _GPU_SAMPLES and len(with_gaps) < _DISTURBED:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        synchronize(device)
        keep_busy(min(spin_us, _LONGEST_SPIN_US), device)
        start.record()
        call()
        end.record()
        began_early = start.query()
        end.synchronize()
        (with_gaps if began_early else whole).append(float(start.elapsed_time(end)) * 1e3)
        spin_us *= 2 if began_early else 1
    return min(whole or with_gaps)


@contextlib.contextmanager
def crowded(copies: int) -> Iterator[None]:
    """Inside the block, `kernel_times_us` runs so many copies of a call side by side, and gives each one's share of the
    time: what a call costs where others keep the device busy anyway.
    """
    before = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(before)


def copies_at_once() -> int:
    """How many copies of a call `kernel_times_us` runs side by side: one outside of `crowded`."""
    return _copies.get()


def kernel_times_us(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Time of each call's kernels on a GPU, without their launches, in microseconds.

    The calls take turns: a GPU that has waited for a compiler may run at a low clock at first, and whichever call came
    first would lose by that. Raises EngineError if a call cannot be captured.
    """
    pool = torch.cuda.graph_pool_handle()
    graphs: list[torch.cuda.CUDAGraph] = []
    copies = copies_at_once()
    with _beside(device) as stream, contextlib.ExitStack() as stack:
        lanes = [stream, *(stack.enter_context(borrowed(device)) for _ in range(copies - 1))]
        for call in calls:
            for lane in lanes:
                try:
                    with torch.cuda.stream(lane):
                        call()  # libraries choose algorithms
                finally:
                    lane.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            _capture_repeated(call, graphs[-1], pool, lanes)
        began = time.perf_counter()
        while time.perf_counter() - began < _CLOCK_RISES_S:
            for graph in graphs:
                _once_us(graph, stream)
        turns = [[_once_us(graph, stream) / copies for graph in graphs] for _ in range(_TURNS)]
    return [median(times) for times in zip(*turns, strict=True)]


def task_times_us(bound: Bound, device: torch.device, *, put_back: Callable[[], object] = lambda: None) -> list[float]:
    """Time of each task alone in microseconds, by task index. `put_back` undoes what tasks write into the state.

    On a GPU each task is captured many times in a small graph of its own, so that its launch hardly counts. On a CPU it
    is the median of a few rounds.
    """
    by_task = [0.0] * len(bound.steps)
    rounds = (
        [_on_gpu(bound, device, put_back)]
        if able(device).graphs
        else [_on_cpu(bound, put_back) for _ in range(_CPU_ROUNDS)][1:]
    )
    for position, step in enumerate(bound.steps):
        by_task[step.task] = median(times[position] for times in rounds)
    return by_task


def _on_cpu(bound: Bound, put_back: Callable[[], object]) -> list[float]:
    put_back()
    times = []
    env = dict(bound.fixed)
    with torch.no_grad():
        for step in bound.steps:
            for buffer in step.drops:
                del env[buffer]
            start = time.perf_counter()
            step.call(env)
            times.append((time.perf_counter() - start) * 1e6)
    return times


def _on_gpu(bound: Bound, device: torch.device, put_back: Callable[[], object]) -> list[float]:
    times = []
    env = dict(bound.fixed)
    pool = torch.cuda.graph_pool_handle()
    graphs: list[torch.cuda.CUDAGraph] = []  # all kept to the end: the pool must not become empty between two captures
    with _beside(device) as stream:
        for step in bound.steps:
            for buffer in step.drops:
                del env[buffer]
            # Random seeds may lie on the host.
            scratch = {b: t if t.is_cuda or b in bound.fixed else t.to(device) for b, t in env.items()}
            step.call(env)
            graphs.append(torch.cuda.CUDAGraph())
            _capture_repeated(functools.partial(step.call, scratch), graphs[-1], pool, [stream])
            times.append(_repeated_us(graphs[-1], stream))
            put_back()
    return times


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Inside, work goes to a stream of its own. It follows the current stream's, and is followed by it."""
    with torch.cuda.device(device), borrowed(device) as stream:
        before = torch.cuda.current_stream(device)
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                yield stream
        finally:  # wait, because memory that kernels still write must not go to others
            before.wait_stream(stream)


def _capture_repeated(
    call: Callable[[], object], graph: torch.cuda.CUDAGraph, pool: Any, lanes: Sequence[torch.cuda.Stream]
) -> None:
    """Capture a call into one graph, on each stream many times, one after another. The first stream is the current one.

    The streams take turns, so that calls which take turns with their weights read different ones side by side.
    """
    first, *others = lanes
    first.synchronize()
    try:
        with capturing(graph, first, pool=pool):
            for lane in others:
                lane.wait_stream(first)
            try:
                for lane in [*lanes] * _REPEATS:
                    with torch.cuda.stream(lane):
                        call()
            except BaseException:
                with contextlib.suppress(*UNCAPTURED):  # the first error is raised below
                    _join(first, others)
                raise
            _join(first, others)
    except UNCAPTURED as e:
        raise EngineError(f"a task cannot be captured: {first_line(e)}") from e


def _join(first: torch.cuda.Stream, others: Sequence[torch.cuda.Stream]) -> None:
    for lane in others:
        first.wait_stream(lane)


def _repeated_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Time of one of the calls in a graph, in microseconds."""
    samples = [_once_us(graph, stream) for _ in range(_GPU_SAMPLES + 1)]
    return median(samples[1:])


def _once_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """The same, in one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / _REPEATS


def _sample(call: Callable[[], object], device: torch.device, calls: int) -> float:
    if able(device).asynchronous:
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
