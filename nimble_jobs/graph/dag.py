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

    Two accesses conflict if they may touch the same bytes of a buffer; views with gaps are compared by rows and
    columns. Tasks that draw random numbers keep their order, since they share one generator. A dependency may be left
    out if others through the same bytes imply it.
    """
    ledgers: list[_Ledger | _Columns] = [_Ledger(buffer.nbytes) for buffer in program.buffers]
    for buffer, period in _periods(program).items():
        ledgers[buffer] = _Columns(period, program.buffers[buffer].nbytes)
    preds: list[set[int]] = []
    last_random: int | None = None
    for position, task in enumerate(program.tasks):
        before: set[int] = set()
        for view in task.reads:
            ledgers[view.buffer].read(view, position, before)
        for view in (*task.writes, *task.mutates):
            ledgers[view.buffer].write(view, position, before)
        if task.random:
            if last_random is not None:
                before.add(last_random)
            last_random = position
        before.discard(position)
        preds.append(before)
    return Dag.from_preds(preds)


class _Ledger:
    """The tasks that touched each byte of one buffer last, as segments [starts[i], starts[i + 1]).

    The last segment has no end.
    """

    __slots__ = ("nbytes", "readers", "starts", "writers")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.starts = [0]
        self.writers: list[int | None] = [None]
        self.readers: list[list[int]] = [[]]  # since the segment was written

    def copy(self) -> _Ledger:
        new = _Ledger(self.nbytes)
        new.starts, new.writers = self.starts.copy(), self.writers.copy()
        new.readers = [readers.copy() for readers in self.readers]
        return new

    def read(self, view: View, task: int, before: set[int]) -> None:
        start, end = view.span
        if start == end:
            return
        for i in self._segments(start, end):
            writer = self.writers[i]
            if writer is not None:
                before.add(writer)
            self.readers[i].append(task)

    def write(self, view: View, task: int, before: set[int]) -> None:
        """Order `task` after all that touched these bytes. Later accesses follow it, so one segment is left."""
        start, end = view.span
        if start == end:
            return
        where = self._segments(start, end)
        for i in where:
            writer = self.writers[i]
            if writer is not None:
                before.add(writer)
            before.update(self.readers[i])
        self.starts[where.start : where.stop] = [start]
        self.writers[where.start : where.stop] = [task]
        self.readers[where.start : where.stop] = [[]]

    def _segments(self, start: int, end: int) -> range:
        """Indexes of the segments of these bytes. Bytes up to the buffer's end need no segment behind them."""
        first = self._cut(start) if start else 0
        return range(first, len(self.starts) if end == self.nbytes else self._cut(end))

    def _cut(self, at: int) -> int:
        """Index of the segment that starts at `at`; splits one if necessary."""
        i = bisect_left(self.starts, at)
        if i == len(self.starts) or self.starts[i] != at:
            self.starts.insert(i, at)
            self.writers.insert(i, self.writers[i - 1])
            self.readers.insert(i, self.readers[i - 1].copy())
        return i


class _Columns:
    """The same for a buffer that is written with gaps: one ledger for each distinct range of columns."""

    def __init__(self, period: int, nbytes: int) -> None:
        self.period = period
        self.nbytes = nbytes
        self.starts = [0]
        self.ledgers = [_Ledger(nbytes)]

    def read(self, view: View, task: int, before: set[int]) -> None:
        for ledger in self.ledgers[self._columns(view)]:
            ledger.read(view, task, before)

    def write(self, view: View, task: int, before: set[int]) -> None:
        where = self._columns(view)
        for ledger in self.ledgers[where]:
            ledger.write(view, task, before)
        if view.span == (0, self.nbytes):  # these columns now have the same history
            del self.starts[where.start + 1 : where.stop]
            del self.ledgers[where.start + 1 : where.stop]

    def _columns(self, view: View) -> slice:
        start, end = columns(view, self.period)
        return slice(self._cut(start), self._cut(end)) if start < end else slice(0, 0)

    def _cut(self, at: int) -> int:
        i = bisect_left(self.starts, at)
        if i == len(self.starts) or self.starts[i] != at:
            self.starts.insert(i, at)
            self.ledgers.insert(i, self.ledgers[i - 1].copy())
        return i


def columns(view: View, period: int) -> tuple[int, int]:
    """A range within [0, period) that contains every byte address of a view modulo `period`.

    With a row's length in bytes as the period, views of different columns have disjoint ranges although their spans
    overlap. The parts of a concatenation are an example.
    """
    if 0 in view.shape:
        return (0, 0)
    width = view.itemsize
    for n, stride in zip(view.shape, view.stride, strict=True):
        if stride * view.itemsize % period:
            width += (n - 1) * stride * view.itemsize
    start = view.offset * view.itemsize % period
    return (start, start + width) if start + width <= period else (0, period)


def _periods(program: Program) -> dict[int, int]:
    """For each buffer, the commonest row length in bytes of views written with gaps. Other buffers are absent."""
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for task in program.tasks:
        for view in (*task.writes, *task.mutates):
            row = _row(view)
            if row is not None:
                counts[view.buffer][row] += 1
    return {buffer: min(rows, key=lambda row: (-rows[row], row)) for buffer, rows in counts.items()}


def _row(view: View) -> int | None:
    """Byte stride of the innermost dimension that leaves a gap; None for a view without gaps."""
    if 0 in view.shape:
        return None
    dense = 1
    for stride, n in sorted([(s, n) for n, s in zip(view.shape, view.stride, strict=True) if n > 1 and s > 0]):
        if stride > dense:
            return stride * view.itemsize
        dense = stride * n if stride == dense else max(dense, stride * (n - 1) + dense)
    return None
