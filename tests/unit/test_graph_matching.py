"""Maximum matching of the bipartite doubling."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from hypothesis import given

from nimble_jobs.graph.dag import Dag
from nimble_jobs.graph.matching import maximum_matching
from tests.strategies import dags, edges


def largest(pairs: list[tuple[int, int]]) -> int:
    """Size of a maximum matching, by trying everything."""
    if not pairs:
        return 0
    (i, j), rest = pairs[0], pairs[1:]
    return max(largest(rest), 1 + largest([(u, v) for u, v in rest if u != i and v != j]))


@given(dags(max_nodes=6))
def test_brute_force_agrees(dag: Dag) -> None:
    """The matching uses edges only, each side of a node at most once, and none is larger."""
    matching = maximum_matching(dag)
    matched = [(i, j) for i, j in enumerate(matching) if j is not None]
    assert set(matched) <= edges(dag)
    assert len({j for _, j in matched}) == len(matched)
    assert len(matched) == largest(sorted(edges(dag)))


@pytest.mark.parametrize("seed", range(6))
def test_networkx_agrees(seed: int) -> None:
    """On graphs of some hundred nodes it is as large as that of networkx."""
    dice = random.Random(seed)
    n = 300
    dag = Dag.from_edges(n, [tuple(sorted(dice.sample(range(n), 2))) for _ in range((seed + 1) * n // 2)])  # type: ignore[misc]
    doubled = nx.Graph([(("x", u), ("y", v)) for u, v in edges(dag)])
    expected = nx.bipartite.maximum_matching(doubled, top_nodes={("x", u) for u, _ in edges(dag)})
    assert sum(j is not None for j in maximum_matching(dag)) == len(expected) // 2


def test_long_alternating_path() -> None:
    """A path of fifty thousand alternations is flipped without recursion: a greedy start would leave one node out."""
    n = 50_000
    pairs = [(2 * i, 2 * i + 1) for i in range(n)] + [(2 * i, 2 * i + 3) for i in range(n - 1)]
    assert sum(j is not None for j in maximum_matching(Dag.from_edges(2 * n, pairs))) == n
