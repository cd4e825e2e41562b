"""A device's memory in marks: who wrote each byte last. A task that finds another mark than program order left is a
hazard, whatever made it: a missing wait, bytes that were given away too early, a view that was not understood.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from nimble_jobs.graph.memory import ALIGNMENT_BYTES, MemoryPlan, aligned
from nimble_jobs.graph.release import releases
from nimble_jobs.schedule import BufferKind, Plan, Program, Task, View

Numbers = npt.NDArray[np.int64]
UNWRITTEN = -1


class Hazards:
    """A program over one memory, where each buffer begins at a place of its own or shared in time.

    Bytes that the same views touch are one mark, so that a run takes a few small copies a task.
    """

    def __init__(self, program: Program, places: Mapping[int, int]) -> None:
        self._program = program
        views = _touched(program)
        unit = math.gcd(ALIGNMENT_BYTES, *(v.itemsize for v in views))
        size = max((places[v.buffer] + program.buffers[v.buffer].nbytes for v in views), default=0)
        whole = np.arange(-(-size // unit), dtype=np.int64)
        dice = Random(0)
        marks = np.zeros(len(whole), np.int64)
        for view in views:
            marks[_bytes(whole, places[view.buffer], view, unit)] ^= dice.getrandbits(
                62
            )  # once, however often it is there
        atoms, atom = np.unique(marks, return_inverse=True)
        self._marks = len(atoms)
        self._where: dict[View, Numbers] = {}
        for view in views:
            there = np.zeros(len(atoms), bool)
            there[atom[_bytes(whole, places[view.buffer], view, unit)]] = True
            self._where[view] = np.flatnonzero(there)
        self._own: dict[int, Numbers] = {}  # by buffer: what program order has left in it so far
        self._drawn = UNWRITTEN
        self._tasks = [self._in_program_order(task) for task in program.tasks]
        self._outputs = [self._expected(p.view) for p in program.outputs if p.view in self._where]

    def first(self, order: Iterable[int]) -> str | None:
        """The first hazard that this order meets; None where there is none."""
        memory = np.full(self._marks, UNWRITTEN, np.int64)
        drawn = UNWRITTEN
        for index in order:
            reads, writes, before = self._tasks[index]
            for view, atoms, expected, known in reads:
                if not np.array_equal(memory[atoms][known], expected):
                    return f"task {index} reads buffer {view.buffer} as {_differing(memory[atoms][known], expected)}"
            if before is not None:
                if drawn != before:
                    return f"task {index} draws random numbers after task {drawn}, not {before}"
                drawn = index
            for atoms in writes:
                memory[atoms] = index
        for view, atoms, expected, known in self._outputs:
            if not np.array_equal(memory[atoms][known], expected):
                return f"output {view.buffer} is left as {_differing(memory[atoms][known], expected)}"
        return None

    def _in_program_order(self, task: Task) -> tuple[list[Any], list[Numbers], int | None]:
        reads = [self._expected(v) for v in dict.fromkeys(task.reads) if v in self._where]
        writes = [v for v in dict.fromkeys((*task.writes, *task.mutates)) if v in self._where]
        for view in writes:
            self._memory(view.buffer)[self._where[view]] = task.index
        before = None
        if task.random:
            before, self._drawn = self._drawn, task.index
        return reads, [self._where[v] for v in writes], before

    def _expected(self, view: View) -> tuple[View, Numbers, Numbers, Any]:
        """Marks that the view must find. What nobody wrote is garbage in an intermediate, and must stay elsewhere."""
        atoms = self._where[view]
        found = self._memory(view.buffer)[atoms].copy()
        garbage = self._program.buffers[view.buffer].kind is BufferKind.INTERMEDIATE
        known = found != UNWRITTEN if garbage else np.ones(len(found), bool)
        return view, atoms, found[known], known

    def _memory(self, buffer: int) -> Numbers:
        return self._own.setdefault(buffer, np.full(self._marks, UNWRITTEN, np.int64))


def arena_places(program: Program, memory: MemoryPlan) -> dict[int, int]:
    """Where buffers begin: those of the arena in it, all others behind it."""
    return _behind(program, {b: at for b, at in enumerate(memory.offsets) if at is not None}, memory.peak_bytes)


def allocated_places(
    program: Program, plan: Plan, given_back: Mapping[int, tuple[int, ...]] | None = None
) -> dict[int, int]:
    """Where an allocator with a pool for each stream puts what operators return. Blocks come as tasks are launched and
    go as `releases`, or else `given_back`, says; one of the stream that is large enough is used again.
    """
    inside = returned(program)
    going = releases(program, plan, inside) if given_back is None else given_back
    free: dict[int, list[tuple[int, int]]] = {}  # by stream: size and start of blocks
    home: dict[int, tuple[int, int, int]] = {}  # by buffer: stream, size, start
    end = 0
    for index in plan.order:
        for buffer in going.get(index, ()):
            stream, size, start = home[buffer]
            free.setdefault(stream, []).append((size, start))
        stream = plan.stream_of[index]
        for view in (*program.tasks[index].reads, *program.tasks[index].writes):
            buffer = view.buffer
            if buffer not in inside or buffer in home:
                continue
            size = aligned(program.buffers[buffer].nbytes)
            block = min((b for b in free.get(stream, []) if b[0] >= size), default=None)
            if block is not None:
                free[stream].remove(block)
            home[buffer] = (stream, *(block or (size, end)))
            end += 0 if block else size
    return _behind(program, {b: start for b, (_, _, start) in home.items()}, end)


def returned(program: Program) -> set[int]:
    """Buffers but outputs that the first task which touches them writes whole, as operators do what they return."""
    first: dict[int, bool] = {}
    for task in program.tasks:
        whole = {v.buffer for v in task.writes if v.span == (0, program.buffers[v.buffer].nbytes)}
        for view in (*task.reads, *task.writes):
            first.setdefault(view.buffer, view.buffer in whole)
    outputs = {p.view.buffer for p in program.outputs}
    inside = {b.index for b in program.buffers if b.kind is BufferKind.INTERMEDIATE} - outputs
    return {b for b in inside if first.get(b)}


def delayed(plan: Plan, before: int, after: int) -> list[int] | None:
    """An order that a plan allows in which `after` runs although `before` has not; None where there is none."""
    place = {task: i for i, task in enumerate(plan.order)}
    needs: dict[int, list[int]] = {task: [] for task in plan.order}
    tail: dict[int, int] = {}
    for task in plan.order:
        stream = plan.stream_of[task]
        if stream in tail:
            needs[task].append(tail[stream])
        tail[stream] = task
    for sync in plan.syncs:
        needs[sync.after].append(sync.before)
    early = {after}
    waiting = [after]
    while waiting:
        for task in needs[waiting.pop()]:
            if task not in early:
                early.add(task)
                waiting.append(task)
    if before in early:
        return None
    return sorted(plan.order, key=lambda task: (task not in early, place[task]))


def _touched(program: Program) -> list[View]:
    """The views that tasks and outputs have of buffers which some task writes. Nothing can happen to others."""
    written = {v.buffer for t in program.tasks for v in (*t.writes, *t.mutates)}
    views = [v for t in program.tasks for v in (*t.reads, *t.writes, *t.mutates)]
    return [v for v in dict.fromkeys((*views, *(p.view for p in program.outputs))) if v.buffer in written]


def _bytes(whole: Numbers, start: int, view: View, unit: int) -> Numbers:
    """The places of a view's bytes, `unit` of them at a time."""
    if 0 in view.shape:
        return whole[:0]
    wide = view.itemsize // unit
    first = start // unit + view.offset * wide
    low, high = view.span
    if high - low == math.prod(view.shape) * view.itemsize:
        return whole[first : first + (high - low) // unit]
    strides = (*(8 * s * wide for s in view.stride), 8)
    return as_strided(whole[first:], (*view.shape, wide), strides).ravel()


def _behind(program: Program, inside: dict[int, int], end: int) -> dict[int, int]:
    """Places for the other buffers that are written, after those that have one."""
    places = dict(inside)
    written = {v.buffer for v in _touched(program)}
    for buffer in program.buffers:
        if buffer.index in written and buffer.index not in places:
            places[buffer.index] = end
            end += aligned(buffer.nbytes) + ALIGNMENT_BYTES
    return places


def _differing(found: Numbers, expected: Numbers) -> str:
    i = int(np.flatnonzero(found != expected)[0])
    return f"written by task {found[i]}, expected task {expected[i]}"
