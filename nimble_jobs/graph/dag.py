"""The dependency graph of a program: which task must see the effect of which earlier one."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nimble_jobs.schedule import Program, View


@dataclass(frozen=True, slots=True)
class Dag:
    """A directed acyclic graph over 0..n-1 whose numbering is a topological order: every edge goes up."""

    n: int
    preds: tuple[tuple[int, ...], ...]  # ascending, without repetition
    succs: tuple[tuple[int, ...], ...]  # ascending, without repetition

    @property
    def edges(self) -> int:
        return sum(map(len, self.preds))

    @classmethod
    def from_edges(cls, n: int, edges: Iterable[tuple[int, int]]) -> Dag:
        """The graph with these edges. Raises ValueError for an edge that does not go up within 0..n-1."""
        preds: list[set[int]] = [set() for _ in range(n)]
        for before, after in edges:
            if not 0 <= before < after < n:
                raise ValueError(f"edge {before} -> {after} does not go up within 0..{n - 1}")
            preds[after].add(before)
        return cls.from_preds(preds)

    @classmethod
    def from_preds(cls, preds: Sequence[Iterable[int]]) -> Dag:
        """The graph in which node i comes after `preds[i]`, all of them smaller than i and each given once."""
        ordered = tuple(tuple(sorted(p)) for p in preds)
        succs: list[list[int]] = [[] for _ in ordered]
        for node, before in enumerate(ordered):
            for p in before:
                succs[p].append(node)
        return cls(len(ordered), ordered, tuple(map(tuple, succs)))


def build_dag(program: Program) -> Dag:
    """Read-after-write, write-after-read and write-after-write dependencies of a program's tasks.

    Accesses conflict where their byte ranges within a buffer meet. Tasks that draw random numbers keep their order, for
    they share one generator. A dependency that follows from others through the same bytes may be left out; what is
    ordered stays ordered.
    """
    periods = _periods(program)
    ledgers: defaultdict[int, _Ledger] = defaultdict(_Ledger)
    preds: list[set[int]] = []
    last_random: int | None = None
    for position, task in enumerate(program.tasks):
        before: set[int] = set()
        for view in task.reads:
            ledgers[view.buffer].read(*footprint(view, periods.get(view.buffer)), position, before)
        for view in (*task.writes, *task.mutates):
            ledgers[view.buffer].write(*footprint(view, periods.get(view.buffer)), position, before)
        if task.random:
            if last_random is not None:
                before.add(last_random)
            last_random = position
        before.discard(position)
        preds.append(before)
    return Dag.from_preds(preds)


class _Ledger:
    """Who touched which bytes of one buffer last: segments [starts[i], starts[i + 1]), the last one without end."""

    __slots__ = ("readers", "starts", "writers")

    def __init__(self) -> None:
        self.starts = [0]
        self.writers: list[int | None] = [None]
        self.readers: list[list[int]] = [[]]  # since the segment was written

    def read(self, start: int, end: int, task: int, before: set[int]) -> None:
        if start == end:
            return
        first, last = self._cut(start), self._cut(end)
        for i in range(first, last):
            writer = self.writers[i]
            if writer is not None:
                before.add(writer)
            self.readers[i].append(task)

    def write(self, start: int, end: int, task: int, before: set[int]) -> None:
        """Order `task` after what touched these bytes. Later accesses need only look at `task`, which makes the
        segments one again.
        """
        if start == end:
            return
        first, last = self._cut(start), self._cut(end)
        for i in range(first, last):
            writer = self.writers[i]
            if writer is not None:
                before.add(writer)
            before.update(self.readers[i])
        self.starts[first:last] = [start]
        self.writers[first:last] = [task]
        self.readers[first:last] = [[]]

    def _cut(self, at: int) -> int:
        """Index of the segment that starts at `at`, made by splitting where there is none."""
        i = bisect_left(self.starts, at)
        if i == len(self.starts) or self.starts[i] != at:
            self.starts.insert(i, at)
            self.writers.insert(i, self.writers[i - 1])
            self.readers.insert(i, self.readers[i - 1].copy())
        return i


def footprint(view: View, period: int | None) -> tuple[int, int]:
    """A range that stands for the bytes of a view: its span, or with a period, the remainders of its byte addresses
    modulo the period.

    Views of one buffer that share a byte have footprints that meet, whatever the period. With the length of a row as
    the period, views of different columns (channels of a concatenation, for one) have footprints that do not meet
    although their spans do.
    """
    if period is None:
        return view.span
    if 0 in view.shape:
        return (0, 0)
    width = view.itemsize
    for n, stride in zip(view.shape, view.stride, strict=True):
        if stride * view.itemsize % period:
            width += (n - 1) * stride * view.itemsize
    start = view.offset * view.itemsize % period
    return (start, start + width) if start + width <= period else (0, period)


def _periods(program: Program) -> dict[int, int]:
    """By buffer, the row length in bytes that most views written with gaps have; absent where no view is."""
    found: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for task in program.tasks:
        for view in (*task.writes, *task.mutates):
            row = _row(view)
            if row is not None:
                found[view.buffer][row] += 1
    return {buffer: min(rows, key=lambda row: (-rows[row], row)) for buffer, rows in found.items()}


def _row(view: View) -> int | None:
    """Byte stride of the innermost dimension that leaves a gap; None for a view without gaps."""
    if 0 in view.shape:
        return None
    dense = 1
    for stride, n in sorted((s, n) for n, s in zip(view.shape, view.stride, strict=True) if n > 1 and s > 0):
        if stride > dense:
            return stride * view.itemsize
        dense = stride * n if stride == dense else max(dense, stride * (n - 1) + dense)
    return None
