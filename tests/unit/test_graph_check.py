"""What the checks of plans accept and refuse, and what a device would make of a refused plan."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import PlanError, UsageError
from nimble_jobs.graph import check, check_plan, make_plan, single_stream
from nimble_jobs.graph.check import check_concurrency, check_order
from nimble_jobs.graph.dag import Dag, build_dag
from nimble_jobs.graph.plan import Analysis
from nimble_jobs.schedule import BufferKind, Plan, Program, Sync
from tests.interleavings import interleaving
from tests.strategies import closure, dags, edges, happens_before, plans, program, programs, task, view

DIAMOND = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
GOOD = Plan(order=(0, 1, 2, 3), stream_of=(0, 0, 1, 0), syncs=(Sync(before=0, after=2), Sync(before=2, after=3)))


@given(dags(max_nodes=7).flatmap(lambda dag: st.tuples(st.just(dag), plans(dag))))
def test_check_is_the_definition(case: tuple[Dag, Plan]) -> None:
    """Any plan passes exactly when happens-before, computed by its definition, holds for every dependency."""
    dag, plan = case
    if edges(dag) <= happens_before(plan):
        check_order(dag, plan)
    else:
        with pytest.raises(PlanError, match="depends on task"):
            check_order(dag, plan)


@given(dags(max_nodes=8).flatmap(plans))
def test_counts_and_sweeps_are_the_definition(plan: Plan) -> None:
    """For few streams and for many, exactly the pairs that happens-before does not hold for are found."""
    pairs = list(product(plan.order, plan.order))
    for find in (check._by_counts, check._by_sweeps):
        found = find(plan)(pairs)
        assert len(found) == len(set(found))
        assert set(found) == set(pairs) - happens_before(plan)


@given(dags(max_nodes=7).flatmap(lambda dag: st.tuples(st.just(dag), plans(dag))))
def test_concurrency_check_is_the_definition(case: tuple[Dag, Plan]) -> None:
    """Any plan has maximum concurrency exactly when it orders no two tasks that the graph leaves independent."""
    dag, plan = case
    if happens_before(plan) <= closure(dag):
        check_concurrency(dag, plan)
    else:
        with pytest.raises(PlanError, match="are independent, but the plan orders them"):
            check_concurrency(dag, plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": (0, 1, 2)}, "3 launches and 4 streams for 4 tasks"),
        ({"order": (0, 1, 2, 4)}, "launches task 4; expected a task in 0.."),
        ({"order": (0, 1, 2, 2)}, "launches task 2 twice"),
        ({"stream_of": (0, 0, -1, 0)}, "task 2 is on stream -1"),
        ({"syncs": (Sync(before=0, after=7),)}, "0 -> 7 names an unknown task"),
        ({"syncs": (Sync(before=0, after=1),)}, "0 -> 1 is needless: both tasks run on stream 0"),
        ({"syncs": (*GOOD.syncs, GOOD.syncs[0])}, "lists a synchronisation twice"),
        ({"order": (0, 1, 3, 2)}, "task 3 would wait for task 2, which is launched later"),
        ({"syncs": GOOD.syncs[:1]}, "task 3 depends on task 2, but"),
        ({"stream_of": (0, 1, 1, 0), "syncs": (*GOOD.syncs[1:], Sync(before=0, after=1))}, None),
        ({"order": (1, 0, 2, 3)}, "task 1 depends on task 0, but"),
    ],
)
def test_malformed_plans(change: dict[str, object], message: str | None) -> None:
    """Each way to break a plan is refused by name; merely giving up concurrency is not."""
    check_order(DIAMOND, GOOD)
    broken = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    if message is None:
        check_order(DIAMOND, broken)
    else:
        with pytest.raises(PlanError, match=message):
            check_order(DIAMOND, broken)


@given(programs(), st.none() | st.integers(1, 3))
def test_programs_are_planned_soundly(some: Program, bound: int | None) -> None:
    """A program with views, mutations and random draws is planned soundly: what it orders is ordered, and no more."""
    plan, facts = make_plan(some, max_streams=bound)
    check_plan(some, plan)
    dag = build_dag(some)
    assert closure(dag) <= happens_before(plan)
    if bound is None:
        assert closure(dag) == happens_before(plan)
        assert facts.syncs_used == facts.syncs_needed
    one, same = single_stream(some)
    check_plan(some, one)
    assert one.order == tuple(range(len(some.tasks)))
    assert (same.meg_edges, same.matching, same.width) == (facts.meg_edges, facts.matching, facts.width)
    assert same.syncs_used == 0


def test_planning_is_deterministic() -> None:
    """Equal programs get equal plans."""
    tasks = [task(i, reads=[view(0)], writes=[view(1 + i % 3)]) for i in range(20)]
    some = program(tasks, [BufferKind.INTERMEDIATE] * 4)
    assert make_plan(some) == make_plan(some)


def test_facts_with_durations() -> None:
    """With measured times the facts hold the longest path and the sum; without, neither."""
    facts = Analysis.of_dag(DIAMOND).plan(durations_us=[1.0, 2.0, 5.0, 1.0])[1]
    assert (facts.critical_path_us, facts.total_work_us) == (7.0, 9.0)
    assert (facts.tasks, facts.edges, facts.meg_edges, facts.matching, facts.width) == (4, 4, 4, 2, 2)
    assert Analysis.of_dag(DIAMOND).plan()[1].critical_path_us is None


def test_nothing_to_plan() -> None:
    """A program without tasks has an empty plan."""
    some = program([], [])
    plan, facts = make_plan(some)
    assert plan == Plan(order=(), stream_of=(), syncs=())
    assert (facts.tasks, facts.width, facts.streams) == (0, 0, 0)
    assert single_stream(some)[0].streams == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_streams": 0}, "max_streams is 0"),
        ({"durations_us": [1.0]}, "1 entries; expected 4"),
        ({"durations_us": [1.0, -1.0, 1.0, 1.0]}, "negative or non-finite"),
        ({"durations_us": [1.0, float("nan"), 1.0, 1.0]}, "negative or non-finite"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    """Arguments that make no sense are refused with what was expected."""
    with pytest.raises(UsageError, match=message):
        Analysis.of_dag(DIAMOND).plan(**arguments)  # type: ignore[arg-type]


def respects(order: list[int], dag: Dag) -> bool:
    place = {task: i for i, task in enumerate(order)}
    return all(place[u] < place[v] for u, v in edges(dag))


@settings(max_examples=25, deadline=None)
@given(dags(max_nodes=10), st.none() | st.integers(1, 3))
def test_no_interleaving_breaks_a_dependency(dag: Dag, bound: int | None) -> None:
    """However the streams advance, every task runs once and after what it depends on."""
    plan, _ = Analysis.of_dag(dag).plan(max_streams=bound)
    for seed in range(100):
        order = list(interleaving(plan, seed))
        assert sorted(order) == list(range(dag.n))
        assert respects(order, dag)


def cells(count: int) -> Dag:
    """Cells of six tasks in three branches, each fed by the two cells before it."""
    pairs = []
    for start in range(0, 6 * count, 6):
        for branch in (start, start + 2, start + 4):
            pairs.append((branch, branch + 1))
            pairs += [(end, branch) for end in (start - 1, start - 3, start - 8) if end >= 0]
    return Dag.from_edges(6 * count, pairs)


def test_a_thousand_interleavings() -> None:
    """A thousand random interleavings of a network of cells meet no hazard."""
    dag = cells(12)
    plan, facts = Analysis.of_dag(dag).plan()
    assert facts.streams > 2
    assert facts.syncs_used > 12
    assert all(respects(list(interleaving(plan, seed)), dag) for seed in range(1_000))


def test_every_synchronisation_is_missed() -> None:
    """Without any one synchronisation some interleaving does break a dependency: the simulation would notice."""
    dag = cells(4)
    plan, _ = Analysis.of_dag(dag).plan()
    for sync in plan.syncs:
        broken = dataclasses.replace(plan, syncs=tuple(s for s in plan.syncs if s != sync))
        assert not all(respects(list(interleaving(broken, seed)), dag) for seed in range(2_000))


def test_a_wait_before_its_event_holds_nothing_back() -> None:
    """As on a device, a wait that is launched before the event is recorded is passed at once; the check refuses such a
    plan.
    """
    dag = Dag.from_edges(2, [(0, 1)])
    backwards = Plan(order=(1, 0), stream_of=(0, 1), syncs=(Sync(before=0, after=1),))
    assert any(list(interleaving(backwards, seed)) == [1, 0] for seed in range(20))
    with pytest.raises(PlanError, match="launched later"):
        check_order(dag, backwards)
