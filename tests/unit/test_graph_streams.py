"""Streams, synchronisations, sharing, the bound on streams, the launch order, and the bounds of any replay."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import PlanError
from nimble_jobs.graph.bounds import critical_path, width
from nimble_jobs.graph.check import check_concurrency, check_order
from nimble_jobs.graph.dag import Dag
from nimble_jobs.graph.matching import maximum_matching
from nimble_jobs.graph.plan import Analysis
from nimble_jobs.graph.reduction import minimum_equivalent_graph
from nimble_jobs.graph.streams import chains, launch_order, share
from nimble_jobs.schedule import Plan, Sync
from tests.strategies import closure, dags, edges, network

DIAMOND = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put the items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in partitions(rest):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


def fewest_by_search(dag: Dag) -> int:
    """The paper's minimum, by trying every assignment with maximum concurrency and, for each, every set of
    synchronisations.
    """
    ordered = closure(dag)
    best = dag.edges + 1
    for groups in partitions(list(range(dag.n))):
        if not all(pair in ordered for group in groups for pair in combinations(group, 2)):
            continue  # two independent tasks on one stream
        in_stream = {pair for group in groups for pair in pairwise(group)}
        across = sorted(ordered - {pair for group in groups for pair in combinations(group, 2)})
        for count in range(best):
            if any(
                closure(Dag.from_edges(dag.n, in_stream | set(some))) == ordered for some in combinations(across, count)
            ):
                best = count
                break
    return best


@settings(max_examples=40, deadline=None)
@given(dags(max_nodes=5))
def test_synchronisations_are_the_fewest(dag: Dag) -> None:
    """No assignment of maximum concurrency does with fewer synchronisations than the plan has, which is |E'| - |M|."""
    plan, facts = Analysis.of_dag(dag).plan()
    assert len(plan.syncs) == facts.syncs_used == facts.syncs_needed == facts.meg_edges - facts.matching
    assert facts.syncs_needed == fewest_by_search(dag)


@given(dags(max_nodes=12))
def test_count_of_synchronisations(dag: Dag) -> None:
    """Sharing of streams neither adds nor saves a synchronisation, and independent tasks stay on different streams."""
    plan, facts = Analysis.of_dag(dag).plan()
    ordered = closure(dag)
    assert len(plan.syncs) == facts.meg_edges - facts.matching
    for u, v in combinations(range(dag.n), 2):
        if (u, v) not in ordered:
            assert plan.stream_of[u] != plan.stream_of[v]


@pytest.mark.parametrize("seed", range(30))
def test_sharing_leaves_nothing_to_share(seed: int) -> None:
    """After sharing, the last task of no stream comes before the first of another."""
    dag = network(20 + seed, Random(seed))
    plan, _ = Analysis.of_dag(dag).plan()
    ordered = closure(dag)
    members = [[i for i in range(dag.n) if plan.stream_of[i] == s] for s in range(plan.streams)]
    assert all(members)
    assert not any((a[-1], b[0]) in ordered for a in members for b in members if a is not b)


@given(dags(max_nodes=12))
def test_bridges_are_paths(dag: Dag) -> None:
    """A bridge leads over edges from the end of one chain to the start of the next one on its stream."""
    meg = minimum_equivalent_graph(dag)
    parts = chains(maximum_matching(meg))
    assert sorted(node for part in parts for node in part) == list(range(dag.n))
    sharing = share(meg, parts)
    assert sharing.streams == len(parts) - len(sharing.bridges)
    for bridge in sharing.bridges:
        assert set(pairwise(bridge)) <= edges(meg)
        assert sharing.stream_of[bridge[0]] == sharing.stream_of[bridge[-1]]


@given(dags(max_nodes=8))
def test_width_is_the_largest_antichain(dag: Dag) -> None:
    """The width is the size of a largest set of pairwise independent tasks; the plan has at least as many streams."""
    ordered = closure(dag)
    plan, facts = Analysis.of_dag(dag).plan()
    largest = max(
        size
        for size in range(dag.n + 1)
        if any(not ordered & set(combinations(some, 2)) for some in combinations(range(dag.n), size))
    )
    assert facts.width_exact
    assert facts.width == largest <= plan.streams
    meg = minimum_equivalent_graph(dag)
    assert width(meg, maximum_matching(meg)) == (largest, True)


@pytest.mark.parametrize("seed", [*range(30), 151, 556, 2836])  # the last ones need flow to be taken back
def test_width_by_the_transitive_closure(seed: int) -> None:
    """The width is the number of nodes less a maximum matching of the transitive closure."""
    dice = Random(seed)
    dag = network(dice.choice([10, 15, 20, 30, 60, 100]), dice, reach=dice.choice([3, 5, 8, 12, 20, 40]))
    matched = sum(j is not None for j in maximum_matching(Dag.from_edges(dag.n, closure(dag))))
    meg = minimum_equivalent_graph(dag)
    matching = maximum_matching(meg)
    assert width(meg, matching) == (dag.n - matched, True)
    assert width(meg, matching, share(meg, chains(matching)).bridges) == (dag.n - matched, True)


def test_width_that_takes_too_long_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search is cut short, the width is that of a cover, and says so."""
    monkeypatch.setattr("nimble_jobs.graph.bounds.PHASES", 0)
    crossed = Dag.from_edges(5, [(0, 2), (1, 2), (2, 3), (2, 4)])
    assert width(crossed, (None,) * 5) == (5, False)


@pytest.mark.parametrize("seed", range(20))
def test_bounded_streams_wait_as_little_as_can_be(seed: int) -> None:
    """On given streams in a given order, the synchronisations are the edges between streams of the transitive
    reduction of dependencies and stream order together.
    """
    dice = Random(seed)
    dag = network(60, dice)
    plan, facts = Analysis.of_dag(dag).plan(max_streams=dice.choice([2, 3, 5]))
    members = [[i for i in plan.order if plan.stream_of[i] == s] for s in range(plan.streams)]
    together = nx.DiGraph([*edges(dag), *(pair for some in members for pair in pairwise(some))])
    across = {(u, v) for u, v in nx.transitive_reduction(together).edges if plan.stream_of[u] != plan.stream_of[v]}
    assert {(sync.before, sync.after) for sync in plan.syncs} == across
    assert len(plan.syncs) == len(across) == facts.syncs_used


@given(dags(min_nodes=1, max_nodes=12), st.integers(1, 4), st.data())
def test_bounded_streams(dag: Dag, bound: int, data: st.DataObject) -> None:
    """With a bound on the streams every dependency is still ordered, and each synchronisation is needed."""
    times = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=dag.n, max_size=dag.n))
    plan, facts = Analysis.of_dag(dag).plan(max_streams=bound, durations_us=times)
    assert plan.streams == facts.streams <= bound
    for sync in plan.syncs:
        with pytest.raises(PlanError):
            check_order(dag, without(plan, sync))


def test_a_bound_that_is_wide_enough_changes_nothing() -> None:
    """The plan within a bound that it keeps anyway is the plan without one."""
    dag = network(40, Random(0))
    plan, facts = Analysis.of_dag(dag).plan()
    assert Analysis.of_dag(dag).plan(max_streams=plan.streams) == (plan, facts)
    assert Analysis.of_dag(dag).plan(max_streams=plan.streams - 1)[0] != plan


def test_bounded_streams_keep_chains_together() -> None:
    """Four long chains on two streams are not torn: hardly a task waits for another stream."""
    chain = [(10 * c + i, 10 * c + i + 1) for c in range(4) for i in range(9)]
    dag = Dag.from_edges(41, [*chain, *((10 * c + 9, 40) for c in range(4))])
    plan, facts = Analysis.of_dag(dag).plan(max_streams=2)
    assert facts.width == 4
    assert plan.streams == 2
    assert len(plan.syncs) <= 1
    assert Analysis.of_dag(DIAMOND).plan(max_streams=1)[0].syncs == ()


def without(plan: Plan, sync: Sync) -> Plan:
    return Plan(order=plan.order, stream_of=plan.stream_of, syncs=tuple(s for s in plan.syncs if s != sync))


@given(dags(max_nodes=10))
def test_a_plan_without_any_one_synchronisation_is_refused(dag: Dag) -> None:
    """Every synchronisation of a plan is needed: the check finds the unordered dependency when it is taken away."""
    plan, _ = Analysis.of_dag(dag).plan()
    check_concurrency(dag, plan)
    for sync in plan.syncs:
        with pytest.raises(PlanError, match=f"task {sync.after} depends on task {sync.before}"):
            check_order(minimum_equivalent_graph(dag), without(plan, sync))


@given(dags(max_nodes=12), st.data())
def test_launch_order(dag: Dag, data: st.DataObject) -> None:
    """Tasks are launched after what they depend on, and of two the one with the longer remaining path first."""
    times = data.draw(st.lists(st.integers(0, 3), min_size=dag.n, max_size=dag.n))
    order = launch_order(dag, times)
    place = {task: i for i, task in enumerate(order)}
    assert all(place[u] < place[v] for u, v in edges(dag))
    left: list[float] = [0.0] * dag.n
    for i in range(dag.n - 1, -1, -1):
        left[i] = times[i] + max((left[j] for j in dag.succs[i]), default=0)
    assert [left[i] for i in order] == sorted(left, reverse=True)


def test_critical_task_is_launched_first() -> None:
    """In a diamond the slower branch is launched first, and without times the longer one."""
    assert launch_order(DIAMOND, [1, 1, 9, 1]) == (0, 2, 1, 3)
    assert launch_order(Dag.from_edges(5, [(0, 1), (0, 2), (2, 3), (1, 4), (3, 4)])) == (0, 2, 1, 3, 4)


@given(dags(min_nodes=1, max_nodes=12), st.data())
def test_critical_path(dag: Dag, data: st.DataObject) -> None:
    """The critical path is a path, as long as the longest one that networkx finds."""
    times = data.draw(st.lists(st.integers(0, 9), min_size=dag.n, max_size=dag.n))
    length, path = critical_path(dag, times)
    assert set(pairwise(path)) <= edges(dag)
    assert length == sum(times[i] for i in path)
    doubled = nx.DiGraph([(("in", i), ("out", i), {"weight": times[i]}) for i in range(dag.n)])
    doubled.add_edges_from((("out", u), ("in", v), {"weight": 0}) for u, v in edges(dag))
    assert length == nx.dag_longest_path_length(doubled)
