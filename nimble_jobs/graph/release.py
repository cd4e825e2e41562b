"""When an intermediate that an operator allocated can be released, also on many streams.

An allocator that serves each stream in launch order may give a released block to the next task of the stream that
allocated it. So a block may be released just before the first task of that stream that happens after all its users.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from nimble_jobs.graph.clocks import Guard, knows, places_on_stream, walk
from nimble_jobs.schedule import Plan, Program


def releases(program: Program, plan: Plan, buffers: Collection[int]) -> dict[int, tuple[int, ...]]:
    """For each task, which of `buffers` may be released just before the task is launched.

    A buffer belongs to the stream of the first task that touches it. If no later task of that stream is known to happen
    after all its users, the buffer stays until the end. O(tasks * live buffers) at worst.
    """
    wanted = set(buffers)
    users: defaultdict[int, list[int]] = defaultdict(list)
    for task in plan.order:
        views = (*program.tasks[task].reads, *program.tasks[task].writes)
        for buffer in sorted({v.buffer for v in views} & wanted):
            users[buffer].append(task)
    place = places_on_stream(plan)
    done_after: defaultdict[int, list[int]] = defaultdict(list)
    guards: dict[int, Guard] = {}
    for buffer, tasks in users.items():
        guard: dict[int, int] = {}
        for task in tasks:
            stream = plan.stream_of[task]
            guard[stream] = max(guard.get(stream, 0), place[task])
        guards[buffer] = tuple(guard.items())
        done_after[tasks[-1]].append(buffer)
    waiting: defaultdict[int, list[int]] = defaultdict(list)  # by stream: buffers whose users were all launched
    released: dict[int, tuple[int, ...]] = {}
    for task, now in walk(plan):
        own = plan.stream_of[task]
        if waiting[own]:
            clock = now.tolist()
            ready = [b for b in waiting[own] if knows(clock, guards[b], own)]
            if ready:
                released[task] = tuple(ready)
                waiting[own] = [b for b in waiting[own] if b not in set(ready)]
        for buffer in done_after[task]:
            waiting[plan.stream_of[users[buffer][0]]].append(buffer)
    return released
