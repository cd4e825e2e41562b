"""Where collectives of a training on several devices stand among a program's tasks, and on which stream they run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from nimble_jobs.graph.dag import build_dag
from nimble_jobs.schedule import ALL_REDUCE, Program


def collectives(program: Program) -> tuple[int, ...]:
    """The tasks that sum over all ranks, in program order, which is the same on each rank."""
    return tuple(task.index for task in program.tasks if task.op == ALL_REDUCE)


def hoisted(program: Program) -> Program:
    """The program with each collective, and what fills its tensor, as early as dependencies allow.

    Otherwise every task keeps its place in the order. Collectives keep their order among themselves. O(n log n + m).
    """
    summed = collectives(program)
    if not summed:
        return program
    dag = build_dag(program)
    buckets = {view.buffer for i in summed for view in program.tasks[i].mutates}
    first = {i for i in range(dag.n) if i in set(summed) or _fills(program, i, buckets)}
    waiting = [len(before) for before in dag.preds]
    ready = [(i not in first, i) for i in range(dag.n) if not waiting[i]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, task = heapq.heappop(ready)
        order.append(task)
        for after in dag.succs[task]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (after not in first, after))
    return replace(program, tasks=tuple(replace(program.tasks[task], index=i) for i, task in enumerate(order)))


def beside(stream_of: Sequence[int], tasks: Sequence[int]) -> tuple[int, ...]:
    """The same streams, and one more for these tasks, so that others run beside them."""
    own, chosen = max(stream_of, default=-1) + 1, set(tasks)
    return tuple(own if i in chosen else stream for i, stream in enumerate(stream_of))


def _fills(program: Program, task: int, buckets: set[int]) -> bool:
    """Whether a task writes nothing but what a collective sums."""
    written = {view.buffer for view in program.tasks[task].writes}
    return bool(written) and written <= buckets
