"""Launches a bound program on several streams: a fork first, an event for each task that others wait for, a join last.

Pools grow to the most streams that were ever asked for, since libraries keep a workspace for each.
"""

from __future__ import annotations

import torch

from nimble_jobs.engine.bind import Bound
from nimble_jobs.engine.streams import take

_POOLS: dict[tuple[str, int], list[torch.cuda.Stream]] = {}  # by use and device index


def streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """The first `count` streams of the process's pool for the tasks of one replay."""
    return _pool("tasks", device, count)


def flight_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """The first `count` streams of the process's pool for whole replays in flight."""
    return _pool("replays", device, count)


def _pool(use: str, device: torch.device, count: int) -> list[torch.cuda.Stream]:
    pool = _POOLS.setdefault((use, device.index or 0), [])
    while len(pool) < count:
        pool.append(take(device))
    return pool[:count]


def run_on_streams(bound: Bound, pool: list[torch.cuda.Stream]) -> dict[str, torch.Tensor]:
    """Launch every task on its stream. These fork from the current stream, which then waits for all of them.

    This also works during a capture, where events become edges of the graph.
    """
    base = torch.cuda.current_stream()
    fork = torch.cuda.Event()
    fork.record(base)
    forked: set[int] = set()
    finished: dict[int, torch.cuda.Event] = {}
    env = dict(bound.fixed)
    for step in bound.steps:
        stream = pool[step.stream]
        if step.stream not in forked:
            stream.wait_event(fork)
            forked.add(step.stream)
        for task in step.waits:
            stream.wait_event(finished[task])
        for buffer in step.drops:
            del env[buffer]
        with torch.cuda.stream(stream):
            step.call(env)
        if step.marked:
            finished[step.task] = torch.cuda.Event()
            finished[step.task].record(stream)
    for index in sorted(forked):
        joined = torch.cuda.Event()
        joined.record(pool[index])
        base.wait_event(joined)
    return bound.results(env)
