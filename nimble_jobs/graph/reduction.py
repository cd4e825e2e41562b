"""The minimum equivalent graph: the fewest edges that keep the same reachability.

For a directed acyclic graph it is unique and is the transitive reduction (A. V. Aho, M. R. Garey, J. D. Ullman, "The
Transitive Reduction of a Directed Graph", SIAM J. Comput. 1(2), 1972). It drops an edge (u, v) exactly if another
predecessor of v can be reached from u.
"""

from __future__ import annotations

from nimble_jobs.graph.dag import Dag
from nimble_jobs.graph.reach import blocks


def minimum_equivalent_graph(dag: Dag) -> Dag:
    """The transitive reduction of `dag`. `nimble_jobs.graph.reach` states time and memory."""
    preds = dag.preds
    far: dict[int, int] = {}  # only edges from a fork to a join can be redundant
    for u, after in enumerate(dag.succs):
        if len(after) > 1:
            joins = [v for v in after if len(preds[v]) > 1]
            if joins:
                far[u] = joins[-1]
    doubled: dict[int, set[int]] = {}
    for block in blocks(far):
        low, high = block[0], max(far[u] for u in block)
        bit = [0] * (high - low + 1)
        for i, u in enumerate(block):
            bit[u - low] = 1 << i
        reached = [0] * (high - low + 1)  # by node: the sources with a path to it
        for v in range(low + 1, high + 1):
            direct = through = 0
            for p in preds[v]:
                if p >= low:
                    direct |= bit[p - low]
                    through |= reached[p - low]
            if direct & through:
                doubled.setdefault(v, set()).update(p for p in preds[v] if p >= low and bit[p - low] & through)
            reached[v - low] = direct | through
    if not doubled:
        return dag
    return Dag.from_preds(
        [[p for p in before if p not in doubled[v]] if v in doubled else before for v, before in enumerate(preds)]
    )
