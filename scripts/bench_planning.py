#!/usr/bin/env python3
"""Time planning, from a recorded program to a checked plan and a checked memory plan, on synthetic programs of growing
size.

Prints a table; --json and --plot write the figures and a log-log picture of them. Times are of one core's work. One
process per row, so that peak memory is the row's own; the quickest of ten runs for small programs down to two for the
largest, for other work on the machine slows each down.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import environment, save

from nimble_jobs.graph import make_plan
from nimble_jobs.graph.check import check_memory
from nimble_jobs.graph.memory import plan_memory
from nimble_jobs.schedule import Buffer, BufferKind, Port, Program, Task, View

Edges = Iterator[tuple[int, int]]


def chain(n: int) -> Edges:
    """One task after another."""
    return ((i, i + 1) for i in range(n - 1))


def fans(n: int, width: int = 500) -> Edges:
    """A task feeds many, which feed one, again and again."""
    hub = 0
    for start in range(1, n - width, width + 1):
        for i in range(start, start + width):
            yield hub, i
            yield i, start + width
        hub = start + width
    yield from ((i, i + 1) for i in range(hub, n - 1))


def one_fan(n: int) -> Edges:
    """A task feeds all others but one, which they feed: the widest there is."""
    return fans(n, n - 2)


def cells(n: int, seed: int = 0) -> Edges:
    """Cells as in NASNet: each block adds two short chains that start from earlier states; two earlier cells are
    inputs.
    """
    dice = random.Random(seed)
    before, last, free = 0, 0, 1
    while free + 60 < n:
        states, used = [before, last], set()
        for _ in range(5):
            ends = []
            for _ in range(2):
                at = dice.choice(states)
                used.add(at)
                for _ in range(dice.choice((1, 2, 4))):
                    yield at, free
                    at, free = free, free + 1
                ends.append(at)
            for end in ends:
                yield end, free
            states.append(free)
            free += 1
        for state in set(states) - used | {states[-1]}:
            yield state, free
        before, last, free = last, free, free + 1
    yield from ((i - 1, i) for i in range(free, n))


def training(n: int) -> Edges:
    """The cells and their mirror image, in which each task also reads what the forward pass left: long edges."""
    forward = list(cells(n // 2))
    last = 2 * (n // 2) - 1
    yield from forward
    for i in range(n // 2):
        yield i, last - i
    for before, after in forward:
        yield last - after, last - before
        yield before, last - after


def layered(n: int, seed: int = 0) -> Edges:
    """Random local edges: a task reads one to three of the 48 tasks before it."""
    dice = random.Random(seed)
    for i in range(1, n):
        for _ in range(dice.choice((1, 1, 2, 2, 3))):
            yield max(0, i - dice.randint(1, 48)), i


def anywhere(n: int, seed: int = 0) -> Edges:
    """Random edges of any length: unlike any network, the hard case."""
    dice = random.Random(seed)
    for _ in range(2 * n):
        yield tuple(sorted(dice.sample(range(n), 2)))  # type: ignore[misc]


SHAPES: dict[str, Callable[[int], Edges]] = {
    f.__name__: f for f in (chain, fans, one_fan, cells, training, layered, anywhere)
}


def synthetic(n: int, edges: Edges, seed: int = 0) -> Program:
    """A program whose task i writes one tensor of a size drawn from few, and reads those of its predecessors."""
    dice = random.Random(seed)
    preds: list[set[int]] = [set() for _ in range(n)]
    for before, after in edges:
        preds[after].add(before)
    read = {p for before in preds for p in before}
    views = [_vector(i + 1, 1024 * dice.choice((1, 4, 16, 16, 24, 64))) for i in range(n)]
    source = _vector(0, 1024)
    tasks = tuple(
        Task(
            index=i,
            op="synthetic",
            args=(),
            kwargs=(),
            outputs=views[i],
            reads=tuple(views[p] for p in sorted(preds[i])) or (source,),
            writes=(views[i],),
            mutates=(),
        )
        for i in range(n)
    )
    buffers = [Buffer(index=0, kind=BufferKind.INPUT, nbytes=4096)]
    buffers += [Buffer(index=i + 1, kind=BufferKind.INTERMEDIATE, nbytes=views[i].span[1]) for i in range(n)]
    outputs = tuple(Port(name=f"output{i}", view=views[i]) for i in range(n) if i not in read)
    return Program(
        buffers=tuple(buffers),
        tasks=tasks,
        inputs=(Port(name="x", view=source),),
        state=(),
        constants=(),
        outputs=outputs,
    )


def _vector(buffer: int, elements: int) -> View:
    return View(buffer=buffer, dtype="float32", itemsize=4, shape=(elements,), stride=(1,))


def measure(shape: str, n: int, max_streams: int | None) -> dict[str, Any]:
    """One row, measured in this process."""
    program = synthetic(n, SHAPES[shape](n))
    runs = [_run(program, max_streams) for _ in range(max(2, min(10, 50_000 // n)))]
    row = {"shape": shape, "tasks": n, "max_streams": max_streams, **min(runs, key=lambda run: run["total_s"])}
    return {**row, "grown_bytes": runs[0]["grown_bytes"]}


def _run(program: Program, max_streams: int | None) -> dict[str, Any]:
    durations = [1.0 + i % 7 for i in range(len(program.tasks))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    plan, facts = make_plan(program, max_streams=max_streams, durations_us=durations)
    planned = time.process_time()
    memory = plan_memory(program, plan)
    placed = time.process_time()
    check_memory(program, plan, memory)
    checked = time.process_time()
    return {
        "plan_s": planned - start,
        "memory_s": placed - planned,
        "check_memory_s": checked - placed,
        "total_s": checked - start,
        "grown_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
        "edges": facts.edges,
        "meg_edges": facts.meg_edges,
        "matching": facts.matching,
        "width": facts.width,
        "width_exact": facts.width_exact,
        "streams": facts.streams,
        "syncs_needed": facts.syncs_needed,
        "syncs_used": facts.syncs_used,
        "arena_bytes": memory.peak_bytes,
        "arena_floor_bytes": memory.floor_bytes,
        "arena_total_bytes": memory.total_bytes,
    }


BAR = {1_000: 0.1, 10_000: 1.0, 100_000: 15.0}  # seconds by tasks, to stay below
COLUMNS = {
    "shape": 9,
    "tasks": 7,
    "max_streams": 12,
    "plan_s": 8,
    "memory_s": 9,
    "check_memory_s": 15,
    "total_s": 9,
    "grown_bytes": 11,
    "edges": 8,
    "meg_edges": 10,
    "width": 7,
    "streams": 8,
    "syncs_used": 11,
    "syncs_needed": 13,
    "arena_bytes": 13,
    "arena_floor_bytes": 13,
}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = []
    for name, room in COLUMNS.items():
        value = row[name]
        text = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
        cells.append(text.rjust(room))
    return "".join(cells)


def plot(rows: list[dict[str, Any]], machine: str, path: Path) -> None:
    """Times and memory against size, both axes logarithmic, with the bar or a line of slope one for comparison."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (whole, places, space) = plt.subplots(1, 3, figsize=(15, 4.8))
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for colour, shape in zip(colours, dict.fromkeys(row["shape"] for row in rows), strict=False):
        for bound in dict.fromkeys(row["max_streams"] for row in rows):
            some = [row for row in rows if (row["shape"], row["max_streams"]) == (shape, bound)]
            sizes = [row["tasks"] for row in some]
            style = {"marker": "o", "markersize": 3, "color": colour, "linestyle": "--" if bound else "-"}
            label = None if bound else shape
            whole.loglog(sizes, [row["total_s"] for row in some], label=label, **style)
            places.loglog(sizes, [row["memory_s"] + row["check_memory_s"] for row in some], **style)
            space.loglog(sizes, [row["grown_bytes"] / 2**20 for row in some], **style)
    whole.loglog(list(BAR), list(BAR.values()), "kv", label="bar")
    sizes = sorted({row["tasks"] for row in rows})
    places.loglog(sizes, [n * 3e-5 for n in sizes], "k:", label="linear, 30 µs a task")
    space.loglog(sizes, [n * 2000 / 2**20 for n in sizes], "k:", label="linear, 2 kB a task")
    whole.set(xlabel="tasks", ylabel="seconds", title="Program to checked plan and checked memory plan")
    places.set(xlabel="tasks", ylabel="seconds", title="of which memory plan and its check")
    space.set(xlabel="tasks", ylabel="MiB beyond the program", title="Memory")
    for axes in (whole, places, space):
        axes.legend(fontsize=8)
    figure.suptitle(f"Planning on one core of {machine} (dashed: streams bounded)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--caps", type=int, nargs="*", default=[8], help="bounds on the streams, beside none")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # one measurement, as JSON: SHAPE TASKS MAX_STREAMS
    options = parser.parse_args()
    if options.row:
        shape, n, bound = options.row.split()
        json.dump(measure(shape, int(n), int(bound) or None), sys.stdout)
        return
    print(line({name: name.removesuffix("_bytes") for name in COLUMNS}))
    rows = []
    for n in options.sizes:
        for shape in options.shapes:
            for bound in (0, *options.caps):
                command = [sys.executable, __file__, "--row", f"{shape} {n} {bound}"]
                row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                rows.append(row)
                print(line(row), flush=True)
    found = environment()
    save(options.json, {"environment": found, "results": rows})
    if options.plot:
        plot(rows, found["machine"], options.plot)


if __name__ == "__main__":
    main()
