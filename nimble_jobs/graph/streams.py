"""From a matching to streams, synchronisations and a launch order: the second half of the paper's algorithm, with our
additions.

The paper (W. Kwon, G.-I. Yu, E. Jeong, B.-G. Chun, "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep
Learning", NeurIPS 2020) makes each chain of matched edges a stream and each unmatched edge of the minimum equivalent
graph a synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from nimble_jobs.graph.clocks import Clock, places_on_stream
from nimble_jobs.graph.dag import Dag
from nimble_jobs.schedule import Plan, Sync


def chains(matching: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """The paths that matched edges form, by first node. A node without matched edges is a chain of its own."""
    followed = {after for after in matching if after is not None}
    paths = []
    for start in range(len(matching)):
        if start not in followed:
            chain = [start]
            while (after := matching[chain[-1]]) is not None:
                chain.append(after)
            paths.append(tuple(chain))
    return tuple(paths)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which chains share a stream."""

    stream_of: tuple[int, ...]  # by node
    # Paths through the graph, each from the last node of a chain to the first node of the next chain on its stream.
    bridges: tuple[tuple[int, ...], ...]

    @property
    def streams(self) -> int:
        return max(self.stream_of, default=-1) + 1


def share(meg: Dag, parts: Sequence[Sequence[int]]) -> Sharing:
    """Put chains on the same stream, one after the other, if that costs no concurrency.

    Chain B may follow chain A if A's last node reaches B's first. Then all of A happens before all of B anyway. This
    adds no synchronisation and saves none: an edge from A's last node to B's first would have been matched.

    Each chain takes the first such stream that a search backwards from its first node meets. Streams on offer are only
    ever taken, so a node whose ancestors offer none is skipped for good. `PATIENCE` bounds the rest of a search; when
    it runs out, the chain gets a stream of its own.
    """
    offers = {part[-1]: chain for chain, part in enumerate(parts)}
    follows: dict[int, int] = {}
    bridges = []
    untried = [len(before) for before in meg.preds]  # predecessors left to try, from the latest down
    for chain, part in enumerate(parts):  # parts are sorted by first node, so ancestors come first
        path = _offer(meg, part[0], offers, untried)
        if path:
            follows[chain] = offers.pop(path[-1])
            bridges.append(tuple(reversed(path)))
    number: list[int] = []
    used = 0
    stream_of = [0] * meg.n
    for chain, part in enumerate(parts):
        if chain in follows:
            number.append(number[follows[chain]])
        else:
            number.append(used)
            used += 1
        for node in part:
            stream_of[node] = number[chain]
    return Sharing(tuple(stream_of), tuple(bridges))


PATIENCE = 10_000  # steps of one search for a stream to share


def _offer(meg: Dag, start: int, offers: dict[int, int], untried: list[int]) -> list[int]:
    """A path backwards from `start` to the last node of a chain without a follower; empty if the search finds none."""
    path = [start]
    for _ in range(PATIENCE):
        node = path[-1]
        if node in offers and node != start:
            return path
        if untried[node]:
            path.append(meg.preds[node][untried[node] - 1])
            continue
        path.pop()
        if not path:
            break
        untried[path[-1]] -= 1
    return []


def launch_order(graph: Dag, durations_us: Sequence[float] | None = None) -> tuple[int, ...]:
    """A topological order with the longest remaining path first; ties keep program order.

    The length of a path is its measured time in microseconds, or without `durations_us` its number of tasks.
    """
    remaining = remaining_us(graph, durations_us)
    return tuple(sorted(range(graph.n), key=lambda i: (-remaining[i], i)))


def remaining_us(graph: Dag, durations_us: Sequence[float] | None = None) -> list[float]:
    """The length of the longest path that starts with each node. Without durations, each task counts as 1."""
    cost = durations_us if durations_us is not None else [1.0] * graph.n
    remaining = [0.0] * graph.n
    for i in range(graph.n - 1, -1, -1):
        remaining[i] = cost[i] + max((remaining[j] for j in graph.succs[i]), default=0.0)
    return remaining


def cross_stream(meg: Dag, stream_of: Sequence[int]) -> tuple[Sync, ...]:
    """The synchronisations that a plan with maximum concurrency needs: one for each edge between streams."""
    return tuple(
        Sync(before=u, after=v) for v, before in enumerate(meg.preds) for u in before if stream_of[u] != stream_of[v]
    )


def cap(
    meg: Dag, matching: Sequence[int | None], max_streams: int, durations_us: Sequence[float] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Launch order and stream of each node for a bounded number of streams.

    List scheduling (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17(2), 1969) in
    simulated time: an idle stream takes the ready task with the longest remaining path. A task prefers the stream of
    its matched predecessor, then the stream of any other, if that predecessor is the last task on it and it is idle.
    O((n + m) log n).
    """
    cost = durations_us if durations_us is not None else [1.0] * meg.n
    remaining = remaining_us(meg, durations_us)
    matched = {after: before for before, after in enumerate(matching) if after is not None}
    waiting = [len(before) for before in meg.preds]
    ready = [(-remaining[i], i) for i in range(meg.n) if not waiting[i]]
    heapify(ready)
    idle = dict.fromkeys(range(max_streams))
    tail: list[int] = [-1] * max_streams
    running: list[tuple[float, int, int]] = []
    order: list[int] = []
    stream_of = [0] * meg.n
    now = 0.0
    while ready or running:
        while ready and idle:
            task = heappop(ready)[1]
            wanted = [matched[task], *meg.preds[task]] if task in matched else meg.preds[task]
            stream = next((stream_of[p] for p in wanted if tail[stream_of[p]] == p and stream_of[p] in idle), None)
            if stream is None:
                stream = next(iter(idle))  # the stream that has been idle longest
            del idle[stream]
            stream_of[task] = stream
            tail[stream] = task
            order.append(task)
            heappush(running, (now + cost[task], task, stream))
        now = running[0][0]
        while running and running[0][0] == now:
            _, task, stream = heappop(running)
            idle[stream] = None
            for after in meg.succs[task]:
                waiting[after] -= 1
                if not waiting[after]:
                    heappush(ready, (-remaining[after], after))
    return tuple(order), tuple(stream_of)


def fewest_syncs(meg: Dag, order: Sequence[int], stream_of: Sequence[int]) -> tuple[Sync, ...]:
    """The smallest set of synchronisations for these streams in this launch order.

    It consists of the cross-stream edges of the minimum equivalent graph of dependencies and stream order together. By
    vector clocks, a task does not wait for a predecessor that is already known to have finished.
    O((n + m) * streams).
    """
    launch = [0] * meg.n
    for i, task in enumerate(order):
        launch[task] = i
    plan = Plan(order=tuple(order), stream_of=tuple(stream_of), syncs=())
    place = places_on_stream(plan)
    waiting = [sum(stream_of[v] != stream_of[u] for v in after) for u, after in enumerate(meg.succs)]
    finished = list(np.zeros((plan.streams, plan.streams), np.int32))
    recorded: dict[int, Clock] = {}  # by task that others wait for: what has finished once it has
    syncs = []
    for task in order:
        stream = stream_of[task]
        clock = finished[stream]
        for before in sorted(meg.preds[task], key=launch.__getitem__, reverse=True):
            if stream_of[before] == stream:
                continue
            if clock[stream_of[before]] < place[before]:
                syncs.append(Sync(before=before, after=task))
                np.maximum(clock, recorded[before], out=clock)
            waiting[before] -= 1
            if not waiting[before]:
                del recorded[before]
        clock[stream] = place[task]
        if waiting[task]:
            recorded[task] = clock.copy()
    return tuple(sorted(syncs, key=lambda s: (s.after, s.before)))
