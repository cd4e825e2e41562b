"""Reachability for many pairs at once: sweeps over the graph, with sets of sources as the bits of an integer.

A query (u, v) only concerns the nodes between u and v in topological order. Sources are grouped by the length of that
window, so that one sweep serves up to `BITS` of them. With n nodes, m edges and windows of length w, the work is
O((n + m) log n + m * w / BITS) big-integer operations of at most `BITS` bits. That is close to linear if edges are
local, and a graph of `BITS` nodes never takes more than a few passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

BITS = 4096  # sources per sweep; about where the work on the bits equals the interpreter's cost of an operation


def blocks(far: dict[int, int]) -> Iterator[list[int]]:
    """Group sources into sweeps. `far` maps each source to the last node that matters to it. Blocks are ascending."""
    classes: defaultdict[int, list[int]] = defaultdict(list)
    for source in sorted(far):
        classes[(far[source] - source).bit_length()].append(source)
    for members in classes.values():
        block: list[int] = []
        end = -1
        for source in members:
            if block and (len(block) == BITS or source > end):
                yield block
                block = []
            block.append(source)
            end = max(end, far[source])
        yield block


def unreached(preds: Sequence[Sequence[int]], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs (u, v) without a path from u to v, sorted. Each node must be larger than all its predecessors."""
    targets: defaultdict[int, set[int]] = defaultdict(set)
    missing = []
    for u, v in pairs:
        if u < v:
            targets[u].add(v)
        else:
            missing.append((u, v))
    far = {u: max(vs) for u, vs in targets.items()}
    for block in blocks(far):
        low, high = block[0], max(far[u] for u in block)
        bit = [0] * (high - low + 1)
        wanted = [0] * (high - low + 1)
        for i, u in enumerate(block):
            bit[u - low] = 1 << i
            for v in targets[u]:
                wanted[v - low] |= 1 << i
        reached = bit.copy()  # by node: the sources with a path to it, itself included
        for v in range(low + 1, high + 1):
            bits = bit[v - low]
            for p in preds[v]:
                if p >= low:
                    bits |= reached[p - low]
            reached[v - low] = bits
            left_out = wanted[v - low] & ~bits
            while left_out:
                lowest = left_out & -left_out
                missing.append((block[lowest.bit_length() - 1], v))
                left_out ^= lowest
    return sorted(missing)
