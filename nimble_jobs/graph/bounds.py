"""Bounds that no replay can beat: the critical path, the total work, and the width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nimble_jobs.graph.dag import Dag
from nimble_jobs.graph.streams import remaining_us

PHASES = 100  # of the flow that computes the width


def critical_path(graph: Dag, durations_us: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """Length in microseconds of the longest path over task times, and the tasks on it in order."""
    remaining = remaining_us(graph, durations_us)
    path: list[int] = []
    heads: Sequence[int] = range(graph.n)
    while heads:
        path.append(max(heads, key=lambda i: (remaining[i], -i)))
        heads = graph.succs[path[-1]]
    return (remaining[path[0]] if path else 0.0), tuple(path)


def width(meg: Dag, matching: Sequence[int | None], bridges: Sequence[Sequence[int]] = ()) -> tuple[int, bool]:
    """The most tasks that can be ready together, and True if that is exact; with False it is an upper bound.

    This is the size of a largest antichain. By R. P. Dilworth ("A Decomposition Theorem for Partially Ordered Sets",
    Annals of Mathematics 51, 1950) it equals the smallest number of chains that cover the order. That is n minus a
    maximum matching of the transitive closure's doubling (D. R. Fulkerson, 1956).

    The closure is not built. A flow through the reduced graph has the same value if each edge y_v -> x_v has unlimited
    capacity, which lets a chain pass through nodes that other chains cover. The flow starts from `matching`, a matching
    of the reduced graph's doubling, and from the `bridges` between its chains. It grows by E. A. Dinic's algorithm
    (1970). Each phase is linear in practice; after `PHASES` phases the best cover so far is the upper bound.
    """
    flow = _Flow(meg, matching, bridges)
    phases = 0
    while roots := flow.rank():
        if phases == PHASES:
            return meg.n - sum(flow.sent), False
        phases += 1
        for root in roots:
            flow.augment(root)
    return meg.n - sum(flow.sent), True


class _Flow:
    """An integral flow. Node x_v has number v, node y_v has number n + v.

    Capacities: source -> x_v 1, y_v -> sink 1; unlimited for x_u -> y_v, one for each edge of the graph, and y_v ->
    x_v.
    """

    def __init__(self, graph: Dag, matching: Sequence[int | None], bridges: Sequence[Sequence[int]]) -> None:
        self.n = graph.n
        self.graph = graph
        self.sent = [after is not None for after in matching]  # source -> x_v is full
        self.taken = [False] * graph.n  # y_v -> sink is full
        self.carried: list[dict[int, int]] = [{} for _ in range(graph.n)]  # by v: flow x_u -> y_v, by u
        self.onward: list[dict[int, None]] = [{} for _ in range(graph.n)]  # by u: every v with flow x_u -> y_v
        self.passed = [0] * graph.n  # y_v -> x_v
        for before, after in enumerate(matching):
            if after is not None:
                self.taken[after] = True
                self._carry(before, after, 1)
        for bridge in bridges:
            self.sent[bridge[0]] = self.taken[bridge[-1]] = True
            for before, after in pairwise(bridge):
                self._carry(before, after, 1)
            for between in bridge[1:-1]:
                self.passed[between] += 1
        self.level: list[int] = []
        self.ways: list[list[int] | None] = []

    def rank(self) -> list[int]:
        """Set each node's breadth-first distance to the sink; the nearest roots, or none when the flow is maximal."""
        n, passed, preds = self.n, self.passed, self.graph.preds
        level = self.level = [-1] * (2 * n)
        self.ways = [None] * (2 * n)
        wave = [n + v for v in range(n) if not self.taken[v]]
        for node in wave:
            level[node] = 0
        depth = 0
        while wave:
            depth += 1
            following = []
            for node in wave:
                origins: Sequence[int]
                if node < n:
                    origins = [n + node, *[n + v for v in self.onward[node]]]
                elif passed[node - n]:
                    origins = [*preds[node - n], node - n]
                else:
                    origins = preds[node - n]
                for origin in origins:
                    if level[origin] < 0:
                        level[origin] = depth
                        following.append(origin)
            roots = [node for node in following if node < n and not self.sent[node]]
            if roots:
                return sorted(roots)
            wave = following
        return []

    def residual(self, node: int) -> list[int]:
        """Nodes to which another unit can go from `node`: along an edge, or back along one that carries flow."""
        n = self.n
        if node >= n:
            return [node - n, *self.carried[node - n]]
        ways = [n + v for v in self.graph.succs[node]]
        return [*ways, n + node] if self.passed[node] else ways

    def augment(self, root: int) -> None:
        """Send one unit from x_root to the sink along a shortest path, if this phase has one left."""
        n, level = self.n, self.level
        path = [root]
        while path:
            node = path[-1]
            if node >= n and not self.taken[node - n]:
                self.taken[node - n] = True
                self.sent[root] = True
                self._send(path)
                return
            ways = self.ways[node]
            if ways is None:
                nearer = level[node] - 1
                ways = self.ways[node] = [way for way in self.residual(node) if level[way] == nearer]
            while ways and not self._open(node, ways[-1]):
                ways.pop()
            if ways:
                path.append(ways[-1])
            else:
                path.pop()
                if path:
                    (self.ways[path[-1]] or [0]).pop()

    def _open(self, node: int, way: int) -> bool:
        """Whether an edge that was usable when the phase began still is. Flow sent back since may have used it up."""
        n = self.n
        if node < n:
            return way != n + node or self.passed[node] > 0
        return way == node - n or way in self.carried[node - n]

    def _send(self, path: list[int]) -> None:
        n = self.n
        for a, b in pairwise(path):
            if a < n and b == n + a:
                self.passed[a] -= 1
            elif a < n:
                self._carry(a, b - n, 1)
            elif b == a - n:
                self.passed[b] += 1
            else:
                self._carry(b, a - n, -1)

    def _carry(self, before: int, after: int, more: int) -> None:
        flow = self.carried[after].get(before, 0) + more
        if flow:
            self.carried[after][before] = flow
            self.onward[before][after] = None
        else:
            del self.carried[after][before]
            del self.onward[before][after]
