"""Hypothesis strategies for the values that the project's properties are about."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nimble_jobs.graph.dag import Dag
from nimble_jobs.graph.plan import make_plan
from nimble_jobs.preprocess import BITS, FLOATS
from nimble_jobs.schedule import Buffer, BufferKind, Plan, Port, Program, Schedule, Sync, Task, View
from nimble_jobs.spec.transform import TransformSpec

ROWS, COLUMNS = 4, 6  # of every buffer of a drawn program
ITEMSIZE = 4


@st.composite
def dags(draw: st.DrawFn, *, min_nodes: int = 0, max_nodes: int = 8) -> Dag:
    """Any graph over a topological numbering, sparse and dense ones alike."""
    n = draw(st.integers(min_nodes, max_nodes))
    pairs = [(i, j) for j in range(n) for i in range(j)]
    if not pairs:
        return Dag.from_edges(n, [])
    return Dag.from_edges(n, draw(st.lists(st.sampled_from(pairs), max_size=2 * n + 4)))


RECTANGLES = ("whole", "whole", "rows", "columns", "block", "transposed", "expanded", "empty")


@st.composite
def views(draw: st.DrawFn, buffer: int, shapes: tuple[str, ...] = (*RECTANGLES, "flat")) -> View:
    """A view of a buffer as models make them: the whole, rows, columns, a flat range, a transposed or expanded one."""
    match draw(st.sampled_from(shapes)):
        case "whole":
            return view(buffer)
        case "rows":
            first, last = sorted((draw(st.integers(0, ROWS - 1)), draw(st.integers(1, ROWS))))
            return view(buffer, (last - first, COLUMNS), offset=first * COLUMNS)
        case "columns":
            first, last = sorted((draw(st.integers(0, COLUMNS - 1)), draw(st.integers(1, COLUMNS))))
            return view(buffer, (ROWS, last - first), offset=first)
        case "block":
            return view(
                buffer, (2, 2), offset=draw(st.integers(0, ROWS - 2)) * COLUMNS + draw(st.integers(0, COLUMNS - 2))
            )
        case "flat":
            first, last = sorted((draw(st.integers(0, ROWS * COLUMNS)), draw(st.integers(0, ROWS * COLUMNS))))
            return view(buffer, (last - first,), (1,), first)
        case "transposed":
            return view(buffer, (COLUMNS, ROWS), (1, COLUMNS))
        case "expanded":
            return view(buffer, (3, COLUMNS), (0, 1), offset=draw(st.integers(0, ROWS - 1)) * COLUMNS)
        case _:
            return view(buffer, (0, COLUMNS))


@st.composite
def programs(
    draw: st.DrawFn, *, max_tasks: int = 10, max_buffers: int = 5, shapes: tuple[str, ...] = (*RECTANGLES, "flat")
) -> Program:
    """Tasks that read, write and mutate views of a few buffers, some of them inputs and outputs, some with random
    draws.
    """
    count = draw(st.integers(0, max_buffers - 1))
    kinds = [BufferKind.INPUT, *draw(st.lists(st.sampled_from(BufferKind), min_size=count, max_size=count))]
    some = st.integers(0, count).flatmap(lambda buffer: views(buffer, shapes))
    tasks = [
        task(
            index,
            reads=draw(st.lists(some, max_size=2)),
            writes=draw(st.lists(some, max_size=1)),
            mutates=draw(st.lists(some, max_size=1)),
            random=draw(st.sampled_from([False, False, False, True])),
        )
        for index in range(draw(st.integers(0, max_tasks)))
    ]
    return program(tasks, kinds, outputs=draw(st.sets(st.integers(0, count), max_size=2)))


@st.composite
def flows(draw: st.DrawFn, *, max_nodes: int = 12) -> Program:
    """Programs as networks have them: a task writes a tensor, or half of one, from those that earlier tasks wrote."""
    return flow(draw(dags(min_nodes=1, max_nodes=max_nodes)), draw(st.randoms(use_true_random=False)))


def flow(dag: Dag, dice: Random) -> Program:
    """The program of a graph: every fifth task or so writes the second half of its predecessor's tensor."""
    tensor: list[int] = []  # by task
    half: list[int | None] = []
    sizes: list[int] = []
    for i in range(dag.n):
        if i and half[i - 1] == 0 and dice.random() < 0.5:
            tensor.append(tensor[i - 1])
            half.append(1)
        else:
            tensor.append(len(sizes))
            half.append(0 if dice.random() < 0.4 else None)
            sizes.append(dice.choice([0, 2, 512, 514, 2048, 6000]))
    tasks = []
    for i, before in enumerate(dag.preds):
        size, part = sizes[tensor[i]], half[i]
        written = flat(tensor[i], size) if part is None else flat(tensor[i], size // 2, part * (size // 2))
        reads = [flat(t, sizes[t]) for t in sorted({tensor[p] for p in before} - {tensor[i]})]
        tasks.append(task(i, reads=reads, writes=[written]))
    outputs = {dice.randrange(len(sizes)) for _ in range(2)}
    return program(tasks, [BufferKind.INTERMEDIATE] * len(sizes), outputs=outputs, nbytes=sizes)


@st.composite
def plans(draw: st.DrawFn, dag: Dag) -> Plan:
    """Any plan of sound shape, right or wrong."""
    order = tuple(draw(st.permutations(range(dag.n))))
    stream_of = tuple(draw(st.lists(st.integers(0, 2), min_size=dag.n, max_size=dag.n)))
    pairs = [(u, v) for i, v in enumerate(order) for u in order[:i] if stream_of[u] != stream_of[v]]
    syncs = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return Plan(order=order, stream_of=stream_of, syncs=tuple(Sync(before=u, after=v) for u, v in sorted(syncs)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Planned programs on any number of streams, with measured times or without."""
    made = draw(st.one_of(programs(), flows()))
    count = len(made.tasks)
    times = st.lists(st.sampled_from([0.0, 0.5, 1.25, 7.0, 1e3]) | st.floats(0, 1e4), min_size=count, max_size=count)
    return schedule(made, draw(st.sampled_from([None, 1, 2, 3])), tuple(draw(st.one_of(st.just([]), times))))


def schedule(made: Program, max_streams: int | None = None, durations_us: tuple[float, ...] = ()) -> Schedule:
    """A schedule of a program as the planner would leave it, with round measurements."""
    plan, facts = make_plan(made, max_streams=max_streams, durations_us=durations_us or None)
    return Schedule(
        key="0123456789abcdef" * 4,
        program=made,
        plan=plan,
        facts=facts,
        durations_us=durations_us,
        candidates=(),
        tolerance=1e-3,
        error=0.0,
        device="a device",
        eager_us=300.0,
        replay_us=100.0,
        peak_bytes=4096,
        build_s=1.0,
    )


def view(
    buffer: int, shape: tuple[int, ...] = (ROWS, COLUMNS), stride: tuple[int, ...] = (COLUMNS, 1), offset: int = 0
) -> View:
    """A float32 view of a buffer of ROWS x COLUMNS elements; the whole of it by default."""
    return View(buffer=buffer, dtype="float32", itemsize=ITEMSIZE, shape=shape, stride=stride, offset=offset)


def flat(buffer: int, nbytes: int, offset: int = 0) -> View:
    """A view of bytes of a buffer."""
    return View(buffer=buffer, dtype="uint8", itemsize=1, shape=(nbytes,), stride=(1,), offset=offset)


def task(
    index: int,
    *,
    reads: list[View] | tuple[View, ...] = (),
    writes: list[View] | tuple[View, ...] = (),
    mutates: list[View] | tuple[View, ...] = (),
    random: bool = False,
) -> Task:
    """A task of no particular operator."""
    return Task(
        index=index,
        op="test.op",
        args=(),
        kwargs=(),
        outputs=None,
        reads=tuple(reads),
        writes=tuple(writes),
        mutates=tuple(mutates),
        random=random,
    )


def program(
    tasks: list[Task],
    kinds: list[BufferKind],
    *,
    outputs: set[int] | frozenset[int] = frozenset(),
    nbytes: list[int] | None = None,
) -> Program:
    """A program over buffers of these kinds; each has ROWS x COLUMNS float32 elements unless sizes are given."""
    sizes = nbytes if nbytes is not None else [ROWS * COLUMNS * ITEMSIZE] * len(kinds)
    buffers = tuple(
        Buffer(index=i, kind=kind, nbytes=size, name=f"buffer{i}")
        for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    )

    def ports(kind: BufferKind) -> tuple[Port, ...]:
        return tuple(Port(name=f"buffer{b.index}", view=flat(b.index, b.nbytes)) for b in buffers if b.kind is kind)

    return Program(
        buffers=buffers,
        tasks=tuple(tasks),
        inputs=ports(BufferKind.INPUT),
        state=ports(BufferKind.STATE),
        constants=ports(BufferKind.CONSTANT),
        outputs=tuple(Port(name=f"output{i}", view=flat(i, sizes[i])) for i in sorted(outputs)),
    )


def elements(of: View) -> set[int]:
    """The byte addresses in its buffer that a view can touch, one by one."""
    starts = {of.offset}
    for n, stride in zip(of.shape, of.stride, strict=True):
        starts = {start + i * stride for start in starts for i in range(n)}
    return {start * of.itemsize + byte for start in starts for byte in range(of.itemsize)}


def network(n: int, dice: Random, reach: int = 12) -> Dag:
    """A graph with up to three edges into each node, most of them from a little way back."""
    pairs = [
        (i - min(i, dice.choice((1, 2, 3, reach))), i) for i in range(1, n) for _ in range(dice.choice((0, 1, 1, 2, 3)))
    ]
    return Dag.from_edges(n, pairs)


def closure(dag: Dag) -> set[tuple[int, int]]:
    """Every pair (u, v) with a path from u to v, the plain way."""
    after: list[set[int]] = [set() for _ in range(dag.n)]
    for u in range(dag.n - 1, -1, -1):
        for v in dag.succs[u]:
            after[u] |= {v} | after[v]
    return {(u, v) for u in range(dag.n) for v in after[u]}


def edges(dag: Dag) -> set[tuple[int, int]]:
    """The edges of a graph."""
    return {(u, v) for v, before in enumerate(dag.preds) for u in before}


def happens_before(plan: Plan) -> set[tuple[int, int]]:
    """The pairs that a plan orders, by definition: earlier on the stream, or waited for, or through a third task."""
    place = {task: i for i, task in enumerate(plan.order)}
    direct = {(s.before, s.after) for s in plan.syncs}
    direct |= {
        (u, v) for v in plan.order for u in plan.order if plan.stream_of[u] == plan.stream_of[v] and place[u] < place[v]
    }
    numbered = Dag.from_edges(len(plan.order), [(place[u], place[v]) for u, v in direct])
    return {(plan.order[u], plan.order[v]) for u, v in closure(numbered)}


@st.composite
def stored_transforms(draw: st.DrawFn) -> tuple[TransformSpec, tuple[int, ...], str]:
    """A transform, and the shape and type of records that it can be applied to; not every one may run on a device."""
    dtype = draw(st.sampled_from(sorted({*BITS, *FLOATS})))
    layout = draw(st.sampled_from(["hw", "chw", "hwc", None]))
    given: dict[str, Any] = {}
    channels = 1
    if layout is None:
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=1)))
        channels = shape[-1] if shape else 1
    else:
        size = draw(st.tuples(st.integers(2, 9), st.integers(2, 9)))
        stored = 1 if layout == "hw" else draw(st.sampled_from([1, 3, 4]))
        shape = {"hw": size, "chw": (stored, *size), "hwc": (*size, stored)}[layout]
        wants = {1: [None, 1, 3], 3: [None, 1, 3], 4: [None, 1, 3]}[stored]
        if layout != "hw":
            given["layout"] = layout
        given["channels"] = draw(st.sampled_from(wants))
        given["resize"] = draw(st.none() | st.tuples(st.integers(2, 9), st.integers(2, 9)))
        most = given["resize"] or size
        given["center_crop"] = draw(st.none() | st.tuples(st.integers(1, most[0]), st.integers(1, most[1])))
        channels = given["channels"] or stored
        if layout == "hw" and dtype != "uint8" and all(v is None for v in given.values()):
            given["channels"] = 1  # else it would be no image
    numbers = st.floats(-100, 100, allow_subnormal=False)
    sizes = st.sampled_from([1, channels])
    given["scale"] = draw(st.none() | st.sampled_from([1 / 255, 1.0, 0.5, 1e-3]))
    given["mean"] = draw(st.none() | sizes.flatmap(lambda n: st.tuples(*[numbers] * n)))
    given["std"] = draw(st.none() | sizes.flatmap(lambda n: st.tuples(*[st.floats(0.01, 100)] * n)))
    return TransformSpec(**given), shape, dtype


@st.composite
def stored_batches(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Two records over the whole range of an integer type, or of moderate numbers."""
    chosen = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if dtype in FLOATS:
        return (chosen.normal(size=(2, *shape)) * draw(st.sampled_from([1.0, 1e-4, 300.0]))).astype(dtype)
    low, high = BITS[dtype]
    return chosen.integers(low, high, size=(2, *shape), dtype=np.int64, endpoint=True).astype(dtype)
