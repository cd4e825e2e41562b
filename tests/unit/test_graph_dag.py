"""The dependency graph of a program."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from nimble_jobs.graph.dag import Dag, build_dag, columns
from nimble_jobs.schedule import BufferKind, Program, View
from tests.strategies import COLUMNS, RECTANGLES, ROWS, closure, edges, elements, program, programs, task, view

FREE = BufferKind.INTERMEDIATE


def conflicts(some: Program) -> set[tuple[int, int]]:
    """Pairs of tasks that touch a common byte, one of them writing, found byte by byte."""
    reads: list[set[tuple[int, int]]] = []
    writes: list[set[tuple[int, int]]] = []
    for one in some.tasks:
        reads.append({(v.buffer, byte) for v in one.reads for byte in elements(v)})
        writes.append({(v.buffer, byte) for v in (*one.writes, *one.mutates) for byte in elements(v)})
    return {
        (i, j)
        for j in range(len(reads))
        for i in range(j)
        if writes[i] & (reads[j] | writes[j]) or reads[i] & writes[j]
    }


@given(programs())
def test_every_conflict_is_ordered(some: Program) -> None:
    """Tasks that share a byte which one of them writes, and tasks that draw random numbers, are ordered as in the
    program.
    """
    draws = [i for i, one in enumerate(some.tasks) if one.random]
    needed = conflicts(some) | set(pairwise(draws))
    assert needed <= closure(build_dag(some))


@given(programs(max_tasks=12, max_buffers=2, shapes=RECTANGLES))
def test_no_dependency_without_a_reason(some: Program) -> None:
    """Among rectangular views, a dependency joins tasks that share a byte, or two random draws."""
    ordered = conflicts(some)
    assert ordered <= closure(build_dag(some))
    for u, v in edges(build_dag(some)):
        assert (u, v) in ordered or (some.tasks[u].random and some.tasks[v].random)


def graph(*tasks: dict[str, list[View]]) -> set[tuple[int, int]]:
    return edges(build_dag(program([task(i, **t) for i, t in enumerate(tasks)], [FREE] * 4)))


def test_read_after_write_write_after_read_write_after_write() -> None:
    """The three hazards each make a dependency, and two reads make none."""
    assert graph({"writes": [view(0)]}, {"reads": [view(0)]}) == {(0, 1)}
    assert graph({"reads": [view(0)]}, {"writes": [view(0)]}) == {(0, 1)}
    assert graph({"writes": [view(0)]}, {"mutates": [view(0)]}) == {(0, 1)}
    assert graph({"reads": [view(0)]}, {"reads": [view(0)]}) == set()
    assert graph({"writes": [view(0)]}, {"writes": [view(1)]}) == set()


def test_rows_of_one_buffer_are_independent() -> None:
    """Writers of different rows do not wait for one another, and a reader of one row waits for its writer alone."""
    top, bottom = view(0, (2, COLUMNS)), view(0, (2, COLUMNS), offset=2 * COLUMNS)
    assert graph({"writes": [top]}, {"writes": [bottom]}, {"reads": [bottom]}) == {(1, 2)}


def test_columns_of_one_buffer_are_independent() -> None:
    """Writers of different columns, as of the parts of a concatenation, do not wait for one another; a reader of all
    does.
    """
    left, right = view(0, (ROWS, 2)), view(0, (ROWS, 4), offset=2)
    found = graph(
        {"writes": [left]}, {"writes": [right]}, {"reads": [view(0)]}, {"reads": [right]}, {"mutates": [left]}
    )
    assert found == {(0, 2), (1, 2), (1, 3), (0, 4), (2, 4)}


def test_readers_of_other_columns_hold_no_writer_back() -> None:
    """A writer of some columns does not wait for the readers of others, even where nothing was written before."""
    left, right = view(0, (ROWS, 2)), view(0, (ROWS, 4), offset=2)
    assert graph({"reads": [left]}, {"writes": [right]}) == set()
    assert graph({"reads": [right]}, {"writes": [left]}) == set()


def test_writing_over_supersedes() -> None:
    """After a write over everything, a later task depends on it alone."""
    reader = {"reads": [view(0)]}
    found = graph({"writes": [view(0)]}, reader, reader, {"writes": [view(0)]}, reader)
    assert {u for u, v in found if v == 4} == {3}


def test_a_task_does_not_depend_on_itself() -> None:
    """A task that reads and mutates the same bytes has no dependency on itself."""
    assert graph({"reads": [view(0)], "mutates": [view(0)]}) == set()


def test_slices_by_the_thousand() -> None:
    """A buffer that ten thousand tasks write slice by slice is done at once, and the reader of all depends on each."""
    n = 10_000
    tasks = [task(i, writes=[view(0, (8,), (1,), 8 * i)]) for i in range(n)] + [
        task(n, reads=[view(0, (8 * n,), (1,))])
    ]
    assert build_dag(program(tasks, [FREE], nbytes=[32 * n])).preds[n] == tuple(range(n))


@given(programs(max_tasks=2))
def test_columns_of_meeting_views_meet(some: Program) -> None:
    """Views that share a byte have columns that meet, for every period."""
    all_views = [v for one in some.tasks for v in (*one.reads, *one.writes, *one.mutates)]
    for a in all_views:
        for b in all_views:
            if a.buffer == b.buffer and elements(a) & elements(b):
                for period in (4, 12, 20, 24, 48, 96, 1000):
                    (s, e), (t, f) = columns(a, period), columns(b, period)
                    assert s < f
                    assert t < e


def test_edges_must_go_up() -> None:
    """An edge against the numbering, or to a node that there is not, is refused by name."""
    for edge in ((1, 0), (0, 0), (0, 3), (-1, 1)):
        with pytest.raises(ValueError, match=f"edge {edge[0]} -> {edge[1]}"):
            Dag.from_edges(3, [edge])
