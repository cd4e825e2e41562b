#!/usr/bin/env python3
"""Measure lookups, saves and listings in a store of many schedules, and commands in one of many jobs.

    python scripts/bench_store.py [--schedules 10000] [--jobs 50000] [--out docs/measurements/store]

Writes OUT.json and OUT.md. Schedules have from 20 to 2000 tasks, one in three a constant; of ten jobs one failed, three
wait, six succeeded. Exits with 1 when the 99th percentile of a lookup is not under 5 ms, or the median of a command
that shows twenty jobs, or submits one, not under 300 ms.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measuring import environment, in_words, save, summary

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nimble_jobs.cli.main import main as main_command  # noqa: E402
from nimble_jobs.job import Hit  # noqa: E402
from nimble_jobs.schedule import Schedule  # noqa: E402
from nimble_jobs.store import Store, open_store, prune  # noqa: E402
from nimble_jobs.store.home import resolve  # noqa: E402
from tests.store_samples import PARTS, a_schedule, key_of, many_jobs  # noqa: E402

LIMIT_MS = 5.0
COMMAND_LIMIT_MS = 300.0
COMMAND_CALLS = 20
TASKS = (20, 50, 100, 200, 400, 2000)
SHARES = (30, 30, 20, 12, 7, 1)  # of a hundred schedules, by number of tasks
MOST_LOOKUPS = 2000
_TURNS = {
    True: "this process went before all others (`chrt -f 1`)",
    False: "where that is above 1, others took turns with it, and the last column says more",
}


def main() -> int:
    """Fill a store, measure, write; 0 when lookups are quick enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many are stored (%(default)s)")
    parser.add_argument("--jobs", type=int, default=50_000, help="how many were submitted (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements" / "store", help="without a suffix")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as folder:
        home = resolve(str(Path(folder) / "home"))
        with open_store(home) as store:
            save_ms, text_bytes = fill(store, options.schedules)
        rows = measure(home, options.schedules)
        rows.insert(0, row("save, with its commit", save_ms))
        database_bytes = (home / "nimble-jobs.db").stat().st_size
        commands = measure_commands(Path(folder), options.jobs)
    figures = {
        "environment": environment(real_time=os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)),
        "schedules": options.schedules,
        "text_bytes": {"median": statistics.median(text_bytes), "largest": max(text_bytes)},
        "database_bytes": database_bytes,
        "results": rows,
        "jobs": options.jobs,
        "commands": commands,
    }
    save(options.out.with_suffix(".json"), figures)
    options.out.with_suffix(".md").write_text(page(figures))
    lookup = next(r for r in rows if r["what"].startswith("lookup, hit"))
    print(f"lookup: median {lookup['median_ms']} ms, 99th percentile {lookup['p99_ms']} ms")
    slowest = max(commands, key=lambda r: r["median_ms"] if r["bounded"] else 0.0)
    print(f"commands: the slowest is {slowest['what']}, median {slowest['median_ms']} ms")
    return 0 if lookup["p99_ms"] < LIMIT_MS and slowest["median_ms"] < COMMAND_LIMIT_MS else 1


def fill(store: Store, count: int) -> tuple[Times, list[int]]:
    """Save that many schedules; the time of each save, the size of each text in bytes."""
    draw = random.Random(0)
    templates = {tasks: a_schedule("", tasks=tasks, constant=b"c" * tasks) for tasks in TASKS}
    plain = {tasks: a_schedule("", tasks=tasks) for tasks in TASKS}
    for template in templates.values():
        store.artifacts.put(b"c" * len(template.program.tasks))
    times: Times = []
    sizes = []
    for number in range(count):
        (tasks,) = draw.choices(TASKS, SHARES)
        schedule: Schedule = replace((templates if number % 3 == 0 else plain)[tasks], key=key_of(str(number)))
        parts = PARTS | {"device": "cpu", "input": f"x:float32[{number}]", "model.file:net.py": key_of(f"f{number}")}
        times += timed(lambda _, s=schedule, p=parts: store.schedules.save(s, parts=p, now=time.time()), [None])
        sizes.append(len(schedule.to_json()))
    return times, sizes


def measure(home: Path, count: int) -> list[dict[str, Any]]:
    """What a process that opens the store finds."""
    draw = random.Random(1)
    lookups = min(MOST_LOOKUPS, 10 * count)
    hits = [key_of(str(draw.randrange(count))) for _ in range(lookups)]
    misses = [key_of(f"miss {number}") for number in range(lookups)]
    opening = timed(lambda _: open_store(home).close(), range(20))
    with open_store(home) as store:
        store.schedules.lookup(hits[0])  # the first statement also compiles it
        return [
            row("open and close the store", opening),
            row("lookup, hit: digest verified, its JSON not parsed", timed(store.schedules.lookup, hits)),
            row("lookup, miss", timed(store.schedules.lookup, misses)),
            row("ready: what a resident hit asks", timed(store.schedules.ready, hits)),
            row("touch, with its commit", timed(lambda key: touch(store, key), hits[: min(200, count)])),
            row("all rows, for a listing", timed(lambda _: prune.aged(store.schedules.list()), range(5))),
            row(
                "what a size cap takes away", timed(lambda _: prune.look(store, prune.Wish(max_bytes=1), 0.0), range(5))
            ),
        ]


def measure_commands(folder: Path, count: int) -> list[dict[str, Any]]:
    """How long commands take among many jobs, without the start of Python and what they import."""
    home = folder / "jobs"
    with open_store(resolve(str(home))) as store:
        ids = many_jobs(store, count, now=time.time() - count)
    data, spec = folder / "x.npy", folder / "job.yaml"
    np.save(data, np.zeros((4, 3, 8, 8), dtype=np.float32))
    spec.write_text(
        "version: 1\nname: small\nkind: score\nmodel: {source: torchvision:resnet18}\n"
        "input: {source: x.npy, format: npy}\noutput: {path: out/small}\n"
    )
    failed, some = ["--filter", "state=failed"], ["-n", "20"]
    asked = {
        "ls -n 20": ["ls", *some],
        "ls --json -n 20": ["ls", "--json", *some],
        "ls --filter state=failed -n 20": ["ls", *failed, *some],
        "ls --filter name=job-3 -n 20": ["ls", "--filter", "name=job-3", *some],
        "ls --sort -finished -n 20": ["ls", "--sort", "-finished", *some],
        "show ID": ["show", ids[count // 2]],
        "submit SPEC": ["submit", str(spec)],
        "worker ls": ["worker", "ls"],
    }
    rows = [command(home, what, words) for what, words in asked.items()]
    rows.append(command(home, "ls, every job", ["ls"], calls=1, bounded=False))
    return rows


def command(
    home: Path, what: str, words: list[str], *, calls: int | None = None, bounded: bool = True
) -> dict[str, Any]:
    """A line of the table of commands; what they print is thrown away."""

    def call(_: object) -> None:
        with Path(os.devnull).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
            code = main_command(["--home", str(home), *words])
        if code:
            raise RuntimeError(f"{what}: exit code {code}")

    call(None)  # imports what the command needs
    return row(what, timed(call, range(calls or COMMAND_CALLS))) | {"bounded": bounded}


def touch(store: Store, key: str) -> None:
    """Count a hit, and have it written."""
    store.schedules.touch(key, Hit.STORED, time.time())
    store.schedules.ready(key)


Times = list[tuple[float, float]]  # of each call, in ms: wall time, time on a processor


def timed(call: Callable[[Any], object], values: Iterable[Any]) -> Times:
    """How long each call took."""
    times = []
    for value in values:
        start, used = time.perf_counter(), time.process_time()
        call(value)
        times.append(((time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3))
    return times


def row(what: str, times: Times) -> dict[str, Any]:
    """A line of the table."""
    used = summary([u for _, u in times])
    return {
        "what": what,
        **summary([w for w, _ in times]),
        "processor_median_ms": used["median_ms"],
        "processor_p99_ms": used["p99_ms"],
    }


def page(figures: dict[str, Any]) -> str:
    """The figures as a page."""
    made, texts = figures["environment"], figures["text_bytes"]
    lines = [
        "# A store of many schedules\n",
        "    python scripts/bench_store.py\n",
        f"{figures['schedules']:,} schedules in one SQLite database of {figures['database_bytes'] / 1e6:,.0f} MB;",
        f"their JSON has {texts['median'] / 1e3:,.0f} kB in the median, {texts['largest'] / 1e3:,.0f} kB at most.",
        "One process, wall time in milliseconds.\n",
        "| operation | calls | median | 99th percentile | longest | 99th percentile on a processor |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['what']} | {r['calls']:,} | {r['median_ms']} ms | {r['p99_ms']} ms | {r['longest_ms']} ms "
            f"| {r['processor_p99_ms']} ms |"
            for r in figures["results"]
        ),
        "",
        f"## Commands among {figures['jobs']:,} jobs\n",
        "The time of a command in a process that has imported what it needs: opening the store, its work, printing.",
        "Of ten jobs one failed, three wait, six succeeded.\n",
        "| command | calls | median | longest | 99th percentile on a processor |",
        "|---|---|---|---|---|",
        *(
            f"| `{r['what']}` | {r['calls']:,} | {r['median_ms']} ms | {r['longest_ms']} ms "
            f"| {r['processor_p99_ms']} ms |"
            for r in figures["commands"]
        ),
        "",
        f"The machine's load was {made['load']} at the end; {_TURNS[made['real_time']]}.\n",
        in_words(made),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
