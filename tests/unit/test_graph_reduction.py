"""The minimum equivalent graph, and reachability by sweeps."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.graph import reach
from nimble_jobs.graph.dag import Dag
from nimble_jobs.graph.reach import unreached
from nimble_jobs.graph.reduction import minimum_equivalent_graph
from tests.strategies import closure, dags, edges


def local(n: int, span: int, seed: int) -> Dag:
    """A graph with up to three edges into each node, most of them short."""
    dice = random.Random(seed)
    return Dag.from_edges(
        n, [(max(0, i - dice.choice((1, 2, 5, span))), i) for i in range(1, n) for _ in range(dice.randint(1, 3))]
    )


@given(dags())
def test_brute_force_agrees(dag: Dag) -> None:
    """An edge is kept exactly when no third node lies between its ends; reachability stays what it was."""
    ordered = closure(dag)
    meg = minimum_equivalent_graph(dag)
    between = {(u, w) for u, v in ordered for x, w in ordered if v == x}
    assert edges(meg) == ordered - between
    assert closure(meg) == ordered


@given(dags(max_nodes=7))
def test_every_edge_of_the_reduction_is_needed(dag: Dag) -> None:
    """Without any one edge the reachability would be another: no equivalent graph has fewer edges."""
    meg = minimum_equivalent_graph(dag)
    for edge in edges(meg):
        assert closure(Dag.from_edges(dag.n, edges(meg) - {edge})) != closure(dag)


@given(dags())
def test_reducing_twice_changes_nothing(dag: Dag) -> None:
    """The reduction of a reduced graph is itself."""
    once = minimum_equivalent_graph(dag)
    assert minimum_equivalent_graph(once) == once


@pytest.mark.parametrize("seed", range(4))
def test_networkx_agrees(seed: int) -> None:
    """On graphs of some hundred nodes the result is that of networkx."""
    dag = local(400, 90, seed)
    expected = nx.transitive_reduction(nx.DiGraph(edges(dag)))
    assert edges(minimum_equivalent_graph(dag)) == set(expected.edges)


@given(dags(), st.integers(1, 3))
def test_many_sweeps_find_what_one_finds(dag: Dag, bits: int) -> None:
    """How many sources share a sweep makes no difference."""
    kept = reach.BITS
    try:
        reach.BITS = bits
        assert closure(minimum_equivalent_graph(dag)) == closure(dag)
        pairs = [(u, v) for u in range(dag.n) for v in range(dag.n)]
        assert set(unreached(dag.preds, pairs)) == set(pairs) - closure(dag)
    finally:
        reach.BITS = kept


def test_a_hundred_thousand_nodes() -> None:
    """A ladder of a hundred thousand nodes with doubled edges of every length is reduced to its chain."""
    n = 100_000
    long = [(i, n - 1 - i) for i in range(n // 2 - 1)]
    dag = Dag.from_edges(n, [(i, i + 1) for i in range(n - 1)] + [(i, i + 2) for i in range(n - 2)] + long)
    assert minimum_equivalent_graph(dag).edges == n - 1
