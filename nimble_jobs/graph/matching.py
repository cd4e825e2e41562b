"""Maximum matching of a graph's bipartite doubling.

The doubling has two copies of each node, x and y, and an edge x_i - y_j for each edge (i, j). Source of the algorithm:
J. E. Hopcroft, R. M. Karp, "An n^(5/2) Algorithm for Maximum Matchings in Bipartite Graphs", SIAM J. Comput. 2(4),
1973. It takes O(m * sqrt(n)), and few phases in practice.
"""

from __future__ import annotations

from nimble_jobs.graph.dag import Dag


def maximum_matching(graph: Dag) -> tuple[int | None, ...]:
    """For each node i, the j for which y_j is matched with x_i, or None. Deterministic; does not recurse."""
    succs = graph.succs
    partner: list[int] = [-1] * graph.n  # by i: the j matched with x_i
    mate: list[int] = [-1] * graph.n  # by j: the i matched with y_j
    _greedy(graph, partner, mate)
    while True:
        level = _levels(succs, partner, mate)
        if level is None:
            return tuple(None if j < 0 else j for j in partner)
        untried = [0] * graph.n
        for root in range(graph.n):
            if partner[root] < 0 and succs[root]:
                _augment(root, succs, partner, mate, level, untried)


def _greedy(graph: Dag, partner: list[int], mate: list[int]) -> None:
    """Start from a maximal matching. Nodes with few successors choose first; each takes its free successor with the
    fewest predecessors.
    """
    for i in sorted(range(graph.n), key=lambda i: len(graph.succs[i])):
        free = [j for j in graph.succs[i] if mate[j] < 0]
        if free:
            j = min(free, key=lambda j: len(graph.preds[j]))
            partner[i], mate[j] = j, i


def _levels(succs: tuple[tuple[int, ...], ...], partner: list[int], mate: list[int]) -> list[int] | None:
    """Breadth-first distance of each x from the unmatched x, up to the first free y; None if there is none."""
    level = [-1] * len(succs)
    wave = [i for i, after in enumerate(succs) if after and partner[i] < 0]
    for i in wave:
        level[i] = 0
    depth = 0
    while wave:
        free_reached = False
        following = []
        for i in wave:
            for j in succs[i]:
                k = mate[j]
                if k < 0:
                    free_reached = True
                elif level[k] < 0:
                    level[k] = depth + 1
                    following.append(k)
        if free_reached:
            return level
        wave = following
        depth += 1
    return None


def _augment(
    root: int,
    succs: tuple[tuple[int, ...], ...],
    partner: list[int],
    mate: list[int],
    level: list[int],
    untried: list[int],
) -> None:
    """Flip one shortest alternating path from `root` to an unmatched y, if this phase has one left."""
    path = [root]
    while path:
        i = path[-1]
        if untried[i] == len(succs[i]):
            path.pop()
            if path:
                untried[path[-1]] += 1
            continue
        j = succs[i][untried[i]]
        k = mate[j]
        if k < 0:
            for x in path:
                y = succs[x][untried[x]]
                partner[x], mate[y] = y, x
                untried[x] += 1
            return
        if level[k] == level[i] + 1:
            path.append(k)
        else:
            untried[i] += 1
