"""The arena: places of intermediates, and when operators' own blocks can be given back."""

from __future__ import annotations

import dataclasses
import gc
from itertools import combinations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import PlanError
from nimble_jobs.graph import make_plan, memory, packing, single_stream
from nimble_jobs.graph.check import check_memory
from nimble_jobs.graph.clocks import places_on_stream, walk
from nimble_jobs.graph.dag import Dag
from nimble_jobs.graph.memory import ALIGNMENT_BYTES, MemoryPlan, aligned, plan_memory
from nimble_jobs.graph.release import releases
from nimble_jobs.schedule import BufferKind, Plan, Program, Sync
from tests.interleavings import interleaving
from tests.strategies import dags, flat, flow, flows, happens_before, network, plans, program, programs, task

FREE = BufferKind.INTERMEDIATE


@given(dags(max_nodes=8).flatmap(plans))
def test_clocks_are_happens_before(plan: Plan) -> None:
    """A clock counts, for each stream, the tasks that happen before by definition: its first ones."""
    ordered = happens_before(plan)
    place = places_on_stream(plan)
    assert [task for task, _ in walk(plan)] == list(plan.order)
    for after, clock in walk(plan):
        for before in plan.order:
            known = place[before] <= clock[plan.stream_of[before]]
            assert known == ((before, after) in ordered)


def buffers_of(some: Program, index: int) -> set[int]:
    one = some.tasks[index]
    return {v.buffer for v in (*one.reads, *one.writes, *one.mutates)}


def run(some: Program, plan: Plan, places: MemoryPlan, seed: int) -> None:
    """Run an interleaving on an arena of marked pages; a task must find its buffers as it or another user left them."""
    owner: dict[int, int] = {}
    begun: set[int] = set()
    for index in interleaving(plan, seed):
        for buffer in buffers_of(some, index):
            start = places.offsets[buffer]
            if start is None:
                continue
            pages = range(start, start + some.buffers[buffer].nbytes, ALIGNMENT_BYTES)
            if buffer in begun:
                assert all(owner[page] == buffer for page in pages), f"task {index} finds buffer {buffer} overwritten"
            begun.add(buffer)
            owner.update(dict.fromkeys(pages, buffer))


@settings(deadline=None)
@given(flows() | programs(), st.none() | st.integers(1, 3), st.booleans())
def test_live_buffers_never_overlap(some: Program, bound: int | None, packed: bool) -> None:
    """On any plan no task finds its buffers overwritten, whatever the interleaving; the check agrees."""
    plan, _ = make_plan(some, max_streams=bound)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "WORTH_PACKING", 1e9 if packed else -1.0)
        places = plan_memory(some, plan)
    check_memory(some, plan, places)
    for seed in range(20):
        run(some, plan, places, seed)


@pytest.mark.parametrize(("packed", "columns"), [(True, 1024), (False, 1024), (False, 2)])
@pytest.mark.parametrize("seed", range(12))
def test_larger_programs(seed: int, packed: bool, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for programs of a hundred tasks, with the joining of free ranges at work, and with streams that only
    their own tasks know of.
    """
    monkeypatch.setattr(memory, "WORTH_PACKING", 1e9 if packed else -1.0)
    monkeypatch.setattr("nimble_jobs.graph.arena.RANGES", 3)
    monkeypatch.setattr("nimble_jobs.graph.clocks.TRACKED", columns)
    for module in ("clocks", "arena"):
        monkeypatch.setattr(f"nimble_jobs.graph.{module}.FEW", columns)
    dice = Random(seed)
    some = flow(network(100, dice), dice)
    plan, _ = make_plan(some, max_streams=None if seed % 2 else 3)
    places = plan_memory(some, plan)
    check_memory(some, plan, places)
    for trial in range(20):
        run(some, plan, places, trial)


@given(flows())
def test_sizes(some: Program) -> None:
    """The arena lies between the single-stream floor and the sum; only intermediates but outputs have places."""
    plan, _ = make_plan(some)
    places = plan_memory(some, plan)
    assert places.floor_bytes <= places.peak_bytes <= places.total_bytes
    outputs = {port.view.buffer for port in some.outputs}
    for buffer, offset in zip(some.buffers, places.offsets, strict=True):
        assert (offset is None) == (buffer.index in outputs or buffer.kind is not FREE)
        if offset is not None:
            assert offset % ALIGNMENT_BYTES == 0
            assert offset + buffer.nbytes <= places.peak_bytes


@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_refused(seed: int) -> None:
    """With a buffer moved anywhere, the check is the definition: who shares bytes is not live at the same time."""
    dice = Random(seed)
    some = flow(network(10 + seed, dice), dice)
    plan, _ = make_plan(some, max_streams=3 if seed % 2 else None)
    ordered = happens_before(plan)
    users: dict[int, list[int]] = {b.index: [] for b in some.buffers}
    for index in range(len(some.tasks)):
        for buffer in buffers_of(some, index):
            users[buffer].append(index)

    def sound(offsets: list[int | None]) -> bool:
        inside = [(at, at + some.buffers[b].nbytes, b) for b, at in enumerate(offsets) if at is not None]
        return all(
            all(pair in ordered for pair in product(users[a], users[b]))
            or all(pair in ordered for pair in product(users[b], users[a]))
            for (s, e, a), (t, f, b) in combinations([one for one in inside if one[0] < one[1]], 2)
            if s < f and t < e
        )

    places = plan_memory(some, plan)
    verdicts = set()
    for _ in range(30):
        offsets = list(places.offsets)
        buffer = dice.choice([b for b, at in enumerate(offsets) if at is not None])
        room = places.peak_bytes - aligned(some.buffers[buffer].nbytes)
        offsets[buffer] = ALIGNMENT_BYTES * dice.randint(0, room // ALIGNMENT_BYTES)
        changed = dataclasses.replace(places, offsets=tuple(offsets))
        verdicts.add(sound(offsets))
        if sound(offsets):
            check_memory(some, plan, changed)
        else:
            with pytest.raises(PlanError, match=r"share bytes of the arena, but task \d+"):
                check_memory(some, plan, changed)
    assert False in verdicts


def branches() -> Program:
    """0 feeds 1 -> 2 and 3 -> 4, which feed 5; each task writes a tensor of its own number."""
    preds = [[], [0], [1], [0], [3], [2, 4]]
    tensors = [flat(i, 4096) for i in range(6)]
    tasks = [task(i, reads=[tensors[p] for p in before], writes=[tensors[i]]) for i, before in enumerate(preds)]
    return program(tasks, [FREE] * 6, outputs={5}, nbytes=[4096] * 6)


def test_independent_branches_do_not_share_bytes() -> None:
    """Bytes that one branch has done with are not given to the other, which may run at any time: program order is no
    proof.
    """
    some = branches()
    plan, _ = make_plan(some)
    many = plan_memory(some, plan)
    assert len({many.offsets[i] for i in (1, 2, 3, 4)}) == 4
    one = plan_memory(some, single_stream(some)[0])
    assert one.peak_bytes == one.floor_bytes == 3 * 4096
    with pytest.raises(PlanError, match="share bytes of the arena"):
        check_memory(some, plan, one)


@pytest.mark.parametrize("packed", [True, False])
def test_a_chain_takes_two_buffers(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand equal tensors one after another live in the space of two."""
    monkeypatch.setattr(memory, "WORTH_PACKING", 1e9 if packed else -1.0)
    tensors = [flat(i, 1000) for i in range(1_000)]
    tasks = [task(i, reads=tensors[max(0, i - 1) : i], writes=[tensors[i]]) for i in range(1_000)]
    some = program(tasks, [FREE] * 1_000, outputs={999}, nbytes=[1000] * 1_000)
    places = plan_memory(some, make_plan(some)[0])
    assert (places.peak_bytes, places.floor_bytes, places.total_bytes) == (2048, 2048, 999 * 1024)


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_are_reused_across_streams(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a join, the tensors of all branches before it are free for all branches behind it."""
    monkeypatch.setattr(memory, "WORTH_PACKING", 1e9 if packed else -1.0)
    cell = ((0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (4, 5))
    dag = Dag.from_edges(201, [(5 * k + i, 5 * k + j) for k in range(40) for i, j in cell])
    tensors = [flat(i, 512) for i in range(dag.n)]
    tasks = [task(i, reads=[tensors[p] for p in before], writes=[tensors[i]]) for i, before in enumerate(dag.preds)]
    some = program(tasks, [FREE] * dag.n, nbytes=[512] * dag.n)
    plan, facts = make_plan(some)
    assert facts.streams == 3
    assert plan_memory(some, plan).peak_bytes == 4 * 512


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_order_gives_what_placing_anew_gives(seed: int) -> None:
    """After buffers were moved to the front, each lies where it would had all been placed in that order."""
    dice = Random(seed)
    count = 30
    sizes = np.array([dice.choice([1, 2, 5, 9]) for _ in range(count)])
    meet = np.zeros((count, count), np.bool_)
    for a, b in combinations(range(count), 2):
        meet[a, b] = meet[b, a] = dice.random() < 0.3
    placing = packing._Placing(sizes, meet)
    for _ in range(5):
        placing.move_to_front(dice.randrange(count), 1)  # given up at once
        assert placing.move_to_front(dice.randrange(count), 1 << 40) is None
        anew = packing._Placing(sizes[placing.order], meet[np.ix_(placing.order, placing.order)])
        assert anew.ranges.tolist() == placing.ranges[placing.order].tolist()
        starts, ends = placing.ranges >> 32, placing.ranges & 0xFFFFFFFF
        assert (ends - starts == sizes).all()
        assert not any(
            meet[a, b] and starts[a] < ends[b] and starts[b] < ends[a] for a in range(count) for b in range(a)
        )


def test_packing_stops_where_buffers_are_all_live_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two streams more is live at once than in program order; packing sees that it has reached it and stops."""
    some = branches()
    plan, _ = make_plan(some)
    moved = []
    monkeypatch.setattr(packing._Placing, "move_to_front", lambda _self, buffer, _limit: moved.append(buffer))
    users = {b: tasks for b, tasks in memory.arena_users(some).items() if tasks}
    offsets, end = packing.pack(plan, users, dict.fromkeys(users, 4096), 3 * 4096, 512) or ({}, 0)
    assert (sorted(offsets), end, moved) == ([0, 1, 2, 3, 4], 5 * 4096, [])


@pytest.mark.parametrize("seed", range(20))
def test_who_may_be_live_at_once(seed: int) -> None:
    """Two buffers, unless every task of one happens before every task of the other, also where tasks are launched in
    another order than the program's.
    """
    dice = Random(seed)
    dag = network(90, dice)
    number = dice.sample(range(dag.n), dag.n)
    base, _ = make_plan(flow(dag, dice), max_streams=(None, 1, 3)[seed % 3])
    plan = Plan(
        order=tuple(number[task] for task in base.order),
        stream_of=tuple(base.stream_of[number.index(task)] for task in range(dag.n)),
        syncs=tuple(Sync(before=number[s.before], after=number[s.after]) for s in base.syncs),
    )
    users = {b: tuple(sorted(dice.sample(range(dag.n), dice.choice((1, 2, 3, 8))))) for b in range(100)}
    ordered = happens_before(plan)
    meet = packing._meet(plan, users, list(users))
    assert meet is not None
    for a, b in product(users, users):
        apart = any(all(pair in ordered for pair in product(users[x], users[y])) for x, y in ((a, b), (b, a)))
        assert meet[a, b] == (a != b and not apart)


def test_packing_is_left_where_too_many_tasks_end_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the last users on each stream, not all users."""
    some = branches()  # on two streams: 0 is ended by both, 1 to 4 by one each
    users = {b: tasks for b, tasks in memory.arena_users(some).items() if tasks}
    size = dict.fromkeys(users, 4096)
    plan, _ = make_plan(some)
    one, _ = single_stream(some)
    ends = {task for tasks in users.values() for task in {plan.stream_of[task]: task for task in tasks}.values()}
    monkeypatch.setattr(packing, "ENDS", len(ends))
    assert packing.pack(plan, users, size, 0, 512) is not None
    monkeypatch.setattr(packing, "ENDS", len(ends) - 1)
    assert packing.pack(plan, users, size, 0, 512) is None
    assert packing.pack(one, users, size, 0, 512) is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_planning_leaves_the_collector_as_it_was(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles are not looked for while a plan is made, and again afterwards, after an error too."""
    seen = []
    monkeypatch.setattr(memory, "arena_users", lambda *_: seen.append(gc.isenabled()) or 1 / 0)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            plan_memory(branches(), single_stream(branches())[0])
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (None, "no place in the arena"),
        (100, "starts at byte 100 of the arena; expected a multiple of 512"),
        (1 << 20, "from which it ends within"),
    ],
)
def test_malformed_memory_plans(offset: int | None, message: str) -> None:
    """A missing, crooked or too high place is refused by name."""
    some = branches()
    plan, _ = make_plan(some)
    places = plan_memory(some, plan)
    broken = dataclasses.replace(places, offsets=(offset, *places.offsets[1:]))
    with pytest.raises(PlanError, match=message):
        check_memory(some, plan, broken)


def test_a_buffer_that_nobody_touches_keeps_its_bytes() -> None:
    """Nothing says when an untouched intermediate is needed, so that nothing else gets its bytes."""
    some = program([task(0, writes=[flat(0, 600)])], [FREE, FREE], nbytes=[600, 600])
    plan, _ = make_plan(some)
    places = plan_memory(some, plan)
    assert sorted(at for at in places.offsets if at is not None) == [0, 1024]
    assert places.peak_bytes == places.floor_bytes == 2048
    with pytest.raises(PlanError, match="no task touches one of them"):
        check_memory(some, plan, dataclasses.replace(places, offsets=(0, 0)))


def test_places_for_some_buffers_only() -> None:
    """Asked about some buffers, the plan places those and leaves the others out; an output is never among them."""
    some = branches()
    plan, _ = make_plan(some)
    places = plan_memory(some, plan, among={1, 3, 5})
    assert [b for b, at in enumerate(places.offsets) if at is not None] == [1, 3]
    assert places.total_bytes == 2 * 4096
    check_memory(some, plan, places, among={1, 3, 5})
    with pytest.raises(PlanError, match="buffer 0 has no place"):
        check_memory(some, plan, places)


def test_more_streams_than_have_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more streams than the clocks track, less is reused and it is still safe."""
    some = branches()
    plan, _ = make_plan(some)
    exact = plan_memory(some, plan)
    monkeypatch.setattr("nimble_jobs.graph.clocks.TRACKED", 1)
    for module in ("clocks", "arena"):
        monkeypatch.setattr(f"nimble_jobs.graph.{module}.FEW", 1)
    rough = plan_memory(some, plan)
    check_memory(some, plan, rough)
    assert exact.peak_bytes <= rough.peak_bytes <= rough.total_bytes


@settings(deadline=None)
@given(flows(), st.none() | st.integers(1, 3))
def test_releases_follow_every_user(some: Program, bound: int | None) -> None:
    """A buffer is released at most once, before a task of the stream that first touched it, after every task that
    touches it.
    """
    plan, _ = make_plan(some, max_streams=bound)
    wanted = {b.index for b in some.buffers} - {port.view.buffer for port in some.outputs}
    found = releases(some, plan, wanted)
    given_back = [b for some_buffers in found.values() for b in some_buffers]
    assert len(given_back) == len(set(given_back))
    users = {b: {t for t in range(len(some.tasks)) if b in buffers_of(some, t)} for b in wanted}
    for seed in range(20):
        done: set[int] = set()
        for index in interleaving(plan, seed):
            for buffer in found.get(index, ()):
                assert users[buffer] <= done
            done.add(index)
