"""Proofs about plans. They rely on two guarantees of a device alone: a stream runs its tasks in launch order, and a
wait holds back what follows it.

These two orders make a graph. Task u happens before task v if v can be reached from u in it. Every check raises
PlanError and names the first offending pair.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, product

import numpy as np

from nimble_jobs.errors import PlanError
from nimble_jobs.graph.dag import Dag, build_dag
from nimble_jobs.graph.memory import ALIGNMENT_BYTES, MemoryPlan, arena_users
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.graph.reach import unreached
from nimble_jobs.schedule import Plan, Program

COUNTED = 64  # streams; with more, a row of counts for all of them costs more than it saves

Unordered = Callable[[Iterable[tuple[int, int]]], list[tuple[int, int]]]  # given pairs, those that are not ordered


@collector_paused()
def check_plan(program: Program, plan: Plan) -> None:
    """Prove that each task is launched once, and that streams and synchronisations order every dependency.

    Raises PlanError.
    """
    check_order(build_dag(program), plan)


def check_order(dag: Dag, plan: Plan) -> None:
    """`check_plan` for a dependency graph that was built earlier."""
    _check_shape(dag.n, plan)
    missing = sorted(_unordered(plan)((u, v) for v, before in enumerate(dag.preds) for u in before))
    if missing:
        u, v = missing[0]
        raise PlanError(
            f"task {v} depends on task {u}, but no stream or synchronisation orders them ({len(missing)} such pairs)"
        )


def check_concurrency(dag: Dag, plan: Plan) -> None:
    """Prove that the plan orders no two tasks that the program leaves independent. Raises PlanError.

    Only for plans without a bound on their streams: a bound has to order independent tasks.
    """
    tail: dict[int, int] = {}
    added = []
    for task in plan.order:
        stream = plan.stream_of[task]
        if stream in tail:
            added.append((tail[stream], task))
        tail[stream] = task
    added.extend((sync.before, sync.after) for sync in plan.syncs)
    edges = {(u, v) for v, before in enumerate(dag.preds) for u in before}
    missing = unreached(dag.preds, (pair for pair in added if pair not in edges))
    if missing:
        u, v = missing[0]
        raise PlanError(f"tasks {u} and {v} are independent, but the plan orders them ({len(missing)} such pairs)")


@collector_paused()
def check_memory(program: Program, plan: Plan, memory: MemoryPlan, *, among: Collection[int] | None = None) -> None:
    """Prove that buffers which share bytes of the arena are never live at the same time. Raises PlanError.

    Every task that touches the first buffer must happen before every task that touches the second. It is enough to
    compare buffers that follow one another directly on some byte, in launch order: the last tasks that touch the
    earlier one with the first tasks that touch the later one.
    """
    _check_shape(len(program.tasks), plan)
    launch = {task: i for i, task in enumerate(plan.order)}
    users = {b: sorted(tasks, key=launch.__getitem__) for b, tasks in arena_users(program, among).items()}
    owners = _Owners()
    shared: list[tuple[int, int]] = []  # a buffer, and the one that takes some of its bytes next
    for buffer in sorted(users, key=lambda b: launch[users[b][0]] if users[b] else -1):
        for other in owners.replace(*_extent(program, memory, buffer), buffer):
            if not users[buffer] or not users[other]:
                raise PlanError(
                    f"buffers {other} and {buffer} share bytes, but no task touches one of them, so its use is unknown"
                )
            shared.append((other, buffer))
    unordered = _unordered(plan)
    lasts, firsts = _ends(plan, users, shared, unordered)
    culprits: dict[tuple[int, int], tuple[int, int]] = {}
    for other, buffer in shared:
        for u, v in product(lasts[other], firsts[buffer]):
            culprits.setdefault((u, v), (other, buffer))
    missing = sorted(unordered(culprits))
    if missing:
        u, v = missing[0]
        other, buffer = culprits[u, v]
        raise PlanError(
            f"buffers {other} and {buffer} share bytes of the arena, but task {u}, which touches the first, does not"
            f" happen before task {v}, which touches the second ({len(missing)} such pairs)"
        )


def _ends(
    plan: Plan, users: dict[int, list[int]], shared: list[tuple[int, int]], unordered: Unordered
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The tasks to compare for `check_memory`: the last ones of each earlier buffer, the first ones of each later
    buffer.

    Some last task of an earlier buffer happens after each of its other tasks, and likewise for the first ones.
    """
    last_on = {b: list({plan.stream_of[t]: t for t in users[b]}.values()) for b, _ in shared}
    first_on = {b: list({plan.stream_of[t]: t for t in reversed(users[b])}.values()) for _, b in shared}
    pairs = {(t, users[b][-1]) for b, on in last_on.items() if len(on) > 1 for t in on}
    pairs |= {(users[b][0], t) for b, on in first_on.items() if len(on) > 1 for t in on}
    apart = set(unordered(pairs))
    for b, on in last_on.items():
        if len(on) > 1:
            last_on[b] = [t for t in on if (t, users[b][-1]) in apart]
    for b, on in first_on.items():
        if len(on) > 1:
            first_on[b] = [t for t in on if (users[b][0], t) in apart]
    return last_on, first_on


def _extent(program: Program, memory: MemoryPlan, buffer: int) -> tuple[int, int]:
    start = memory.offsets[buffer]
    if start is None:
        raise PlanError(f"buffer {buffer} has no place in the arena")
    if start < 0 or start % ALIGNMENT_BYTES or start + program.buffers[buffer].nbytes > memory.peak_bytes:
        raise PlanError(
            f"buffer {buffer} of {program.buffers[buffer].nbytes} bytes starts at byte {start} of the arena; expected a"
            f" multiple of {ALIGNMENT_BYTES} from which it ends within {memory.peak_bytes} bytes"
        )
    return start, start + program.buffers[buffer].nbytes


class _Owners:
    """The latest buffer on each byte, as segments [starts[i], starts[i + 1]). The last segment has no end."""

    def __init__(self) -> None:
        self.starts = [0]
        self.owners: list[int | None] = [None]

    def replace(self, start: int, end: int, buffer: int) -> set[int]:
        """Put `buffer` on these bytes and return the buffers that were there."""
        if start == end:
            return set()
        first, last = self._cut(start), self._cut(end)
        replaced = {owner for owner in self.owners[first:last] if owner is not None}
        self.starts[first:last] = [start]
        self.owners[first:last] = [buffer]
        return replaced

    def _cut(self, at: int) -> int:
        i = bisect_left(self.starts, at)
        if i == len(self.starts) or self.starts[i] != at:
            self.starts.insert(i, at)
            self.owners.insert(i, self.owners[i - 1])
        return i


def _unordered(plan: Plan) -> Unordered:
    """A function that selects, from pairs (u, v) of tasks, those for which the plan lets v start before u has finished.

    The plan must have passed `_check_shape`.
    """
    return _by_counts(plan) if plan.streams <= COUNTED else _by_sweeps(plan)


def _by_counts(plan: Plan) -> Unordered:
    """Compares counts: how many tasks of each stream have finished before a task starts.

    A stream keeps its order, so these are always its first tasks (H. V. Jagadish, "A Compression Technique to
    Materialize Transitive Closure", ACM Trans. Database Syst. 15(4), 1990). What a task knows of other streams changes
    only when its own stream waits, so there is one row of counts for each task that waits. O(n + syncs * streams).
    """
    waits: defaultdict[int, list[int]] = defaultdict(list)
    for sync in plan.syncs:
        waits[sync.after].append(sync.before)
    rows = np.zeros((plan.streams + len(waits), plan.streams), np.int32)
    row_of = [0] * len(plan.order)
    number = [0] * len(plan.order)  # on its stream, from 1
    latest = list(range(plan.streams))  # by stream: the row in force
    launched = [0] * plan.streams
    used = plan.streams
    for task in plan.order:
        stream = plan.stream_of[task]
        if task in waits:
            row = rows[used]
            row[:] = rows[latest[stream]]
            for before in waits[task]:
                np.maximum(row, rows[row_of[before]], out=row)
                other = plan.stream_of[before]
                row[other] = max(row[other], number[before])
            latest[stream] = used
            used += 1
        row_of[task] = latest[stream]
        launched[stream] += 1
        number[task] = launched[stream]
    numbers, row_numbers, streams = (np.array(one, np.int64) for one in (number, row_of, plan.stream_of))

    def unordered(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        asked = np.fromiter(chain.from_iterable(pairs), np.int64).reshape(-1, 2)
        u, v = asked.T
        known = np.where(streams[u] == streams[v], numbers[v] - 1, rows[row_numbers[v], streams[u]])
        return [(u, v) for u, v in asked[known < numbers[u]].tolist()]

    return unordered


def _by_sweeps(plan: Plan) -> Unordered:
    """Tests reachability. For any number of streams."""
    place = [0] * len(plan.order)
    for i, task in enumerate(plan.order):
        place[task] = i
    stream_of = plan.stream_of
    direct = {(sync.before, sync.after) for sync in plan.syncs}
    preds = _happens_after(plan, place)

    def unordered(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        queries = []
        for u, v in pairs:
            if stream_of[u] == stream_of[v] and place[u] < place[v]:
                continue
            if (u, v) not in direct:
                queries.append((place[u], place[v]))
        return [(plan.order[u], plan.order[v]) for u, v in unreached(preds, queries)]

    return unordered


def _happens_after(plan: Plan, place: Sequence[int]) -> list[list[int]]:
    """For each place in launch order, the places it directly follows: the previous task of its stream and its waits."""
    preds: list[list[int]] = [[] for _ in plan.order]
    tail: dict[int, int] = {}
    for i, task in enumerate(plan.order):
        stream = plan.stream_of[task]
        if stream in tail:
            preds[i].append(tail[stream])
        tail[stream] = i
    for sync in plan.syncs:
        preds[place[sync.after]].append(place[sync.before])
    return preds


def _check_shape(n: int, plan: Plan) -> None:
    if len(plan.order) != n or len(plan.stream_of) != n:
        raise PlanError(f"the plan has {len(plan.order)} launches and {len(plan.stream_of)} streams for {n} tasks")
    place = [n] * n
    for i, task in enumerate(plan.order):
        if not 0 <= task < n:
            raise PlanError(f"the plan launches task {task}; expected a task in 0..{n - 1}")
        if place[task] < n:
            raise PlanError(f"the plan launches task {task} twice")
        place[task] = i
    for task, stream in enumerate(plan.stream_of):
        if stream < 0:
            raise PlanError(f"task {task} is on stream {stream}; expected 0 or more")
    for sync in plan.syncs:
        before, after = sync.before, sync.after
        if not (0 <= before < n and 0 <= after < n):
            raise PlanError(f"synchronisation {before} -> {after} names an unknown task; expected tasks in 0..{n - 1}")
        if plan.stream_of[before] == plan.stream_of[after]:
            raise PlanError(
                f"synchronisation {before} -> {after} is needless: both tasks run on stream {plan.stream_of[after]}"
            )
        if place[before] > place[after]:
            raise PlanError(f"task {after} would wait for task {before}, which is launched later")
    if len({(sync.before, sync.after) for sync in plan.syncs}) != len(plan.syncs):
        raise PlanError("the plan lists a synchronisation twice")
