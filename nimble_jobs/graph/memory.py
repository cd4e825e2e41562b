"""Places intermediates in one arena. Bytes are reused only if the plan proves that this is safe, also on many streams.

A buffer may take the bytes of an older one if every task that touches the old one happens before every task that
touches the new one. Streams and synchronisations must guarantee that; program order does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from nimble_jobs.graph.arena import Arena
from nimble_jobs.graph.clocks import Clock, Guard, knows, places_on_stream, tracked, walk
from nimble_jobs.graph.packing import pack
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.schedule import BufferKind, Plan, Program

ALIGNMENT_BYTES = 512
# A packed arena must be at most this share of the one filled in launch order, which reuses bytes sooner, so that they
# are likelier to be in a cache.
WORTH_PACKING = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where each intermediate lies in the arena of one instance."""

    offsets: tuple[int | None, ...]  # bytes, by buffer; None for buffers outside the arena: inputs, state, outputs, ...
    peak_bytes: int  # size of the arena
    total_bytes: int = 0  # its size if nothing were reused
    floor_bytes: int = 0  # peak live bytes on one stream in program order; there, no placement needs less


@collector_paused()
def plan_memory(program: Program, plan: Plan, *, among: Collection[int] | None = None) -> MemoryPlan:
    """Place every intermediate that is not an output, or only those in `among`. Deterministic.

    Close to linear in tasks and synchronisations. Up to `packing.BUFFERS` buffers, also quadratic in buffers.
    """
    users = arena_users(program, among)
    size = {buffer: aligned(program.buffers[buffer].nbytes) for buffer in users}
    used = {buffer: tasks for buffer, tasks in users.items() if tasks}
    offsets, end = _fill(plan, used, size, _shared_starts(plan, _begun_together(program, used)))
    floor = _floor(used, size, len(program.tasks))
    if floor <= WORTH_PACKING * end:
        packed = pack(plan, used, size, floor, ALIGNMENT_BYTES)
        if packed is not None and packed[1] <= WORTH_PACKING * end:
            offsets, end = packed
    for buffer in sorted(users.keys() - used.keys()):  # no task touches it, so nobody knows when it is in use
        offsets[buffer] = end
        end += size[buffer]
    return MemoryPlan(
        offsets=tuple(offsets.get(buffer.index) for buffer in program.buffers),
        peak_bytes=end,
        total_bytes=sum(size.values()),
        floor_bytes=floor + sum(size[buffer] for buffer in users.keys() - used.keys()),
    )


def live_bytes(program: Program, *, among: Collection[int] | None = None) -> int:
    """Peak live bytes, in program order, of all intermediates, or only those in `among`."""
    users = {buffer: tasks for buffer, tasks in arena_users(program, among).items() if tasks}
    return _floor(users, {b: program.buffers[b].nbytes for b in users}, len(program.tasks))


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def arena_users(program: Program, among: Collection[int] | None = None) -> dict[int, tuple[int, ...]]:
    """The buffers that belong in the arena, each with the tasks that touch it in program order."""
    kept = {port.view.buffer for port in program.outputs}
    users: dict[int, list[int]] = {
        b.index: []
        for b in program.buffers
        if b.kind is BufferKind.INTERMEDIATE and b.index not in kept and (among is None or b.index in among)
    }
    for position, task in enumerate(program.tasks):
        for view in (*task.reads, *task.writes, *task.mutates):
            touching = users.get(view.buffer)
            if touching is not None and (not touching or touching[-1] != position):
                touching.append(position)
    return {buffer: tuple(tasks) for buffer, tasks in users.items()}


def _fill(
    plan: Plan, users: dict[int, tuple[int, ...]], size: dict[int, int], shared: dict[int, Clock]
) -> tuple[dict[int, int], int]:
    """Fill an arena in launch order; the offset of each buffer and the arena's size, in bytes.

    A buffer takes its place when the first of its tasks is launched, and frees it when the last one is.
    """
    place = places_on_stream(plan)
    launch = [0] * len(plan.order)
    for i, task in enumerate(plan.order):
        launch[task] = i
    opens: defaultdict[int, list[int]] = defaultdict(list)
    closes: defaultdict[int, list[int]] = defaultdict(list)
    for buffer, tasks in users.items():
        launched = [launch[task] for task in tasks]
        opens[plan.order[min(launched)]].append(buffer)
        closes[plan.order[max(launched)]].append(buffer)
    arena = Arena(plan.streams, tracked(plan))
    offsets: dict[int, int] = {}
    for task, now in walk(plan):
        if task not in opens and task not in closes:
            continue
        clock, own = now.data, plan.stream_of[task]
        for buffer in sorted(opens.get(task, ()), key=lambda b: (-size[b], b)):
            if buffer in shared:
                offsets[buffer] = arena.take(size[buffer], shared[buffer].data, None)
            else:
                offsets[buffer] = arena.take(size[buffer], clock, own)
        for buffer in closes.get(task, ()):
            guard: Guard = ((own, place[task]),)  # enough if this task is known to come after all other users
            others: dict[int, int] = {}
            for user in users[buffer]:
                stream = plan.stream_of[user]
                if stream != own:
                    others[stream] = max(others.get(stream, 0), place[user])
            if not knows(clock, tuple(others.items()), own):
                guard += tuple(others.items())
            arena.give(offsets[buffer], size[buffer], guard)
    return offsets, arena.end


def _begun_together(program: Program, users: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Buffers whose first task does not overwrite them whole, so another task may start first."""
    begun = {buffer: tasks for buffer, tasks in users.items() if len(tasks) > 1}
    for task in {tasks[0] for tasks in begun.values()}:
        for view in (*program.tasks[task].writes, *program.tasks[task].mutates):
            tasks = begun.get(view.buffer, ())
            if task in tasks[:1] and view.span == (0, program.buffers[view.buffer].nbytes):
                del begun[view.buffer]
    return begun


def _shared_starts(plan: Plan, users: dict[int, tuple[int, ...]]) -> dict[int, Clock]:
    """For each buffer whose first task does not happen before all others: what is known before any starts."""
    if not users:
        return {}
    buffers_of: defaultdict[int, list[int]] = defaultdict(list)
    for buffer, tasks in users.items():
        for task in tasks:
            buffers_of[task].append(buffer)
    place = places_on_stream(plan)
    first: dict[int, tuple[int, Clock]] = {}  # task and its clock
    left = {buffer: len(tasks) for buffer, tasks in users.items()}
    shared: dict[int, Clock] = {}
    for task, now in walk(plan):
        if task not in buffers_of:
            continue
        own = plan.stream_of[task]
        for buffer in buffers_of[task]:
            if buffer not in first:
                first[buffer] = (task, now.copy())
            start, known = first[buffer]
            left[buffer] -= 1
            if not left[buffer]:
                del first[buffer]
            stream = plan.stream_of[start]
            if stream != own and not (stream < len(now) and now[stream] >= place[start]):
                shared[buffer] = np.minimum(shared.get(buffer, known), now)
    return shared


def _floor(users: dict[int, tuple[int, ...]], size: dict[int, int], tasks: int) -> int:
    change = [0] * (tasks + 1)
    for buffer, touching in users.items():
        change[touching[0]] += size[buffer]
        change[touching[-1] + 1] -= size[buffer]
    live = peak = 0
    for delta in change:
        live += delta
        peak = max(peak, live)
    return peak
