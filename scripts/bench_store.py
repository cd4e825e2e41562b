#!/usr/bin/env python3
"""Measure lookups, saves and listings in a store of many schedules.

    python scripts/bench_store.py [--schedules 10000] [--out docs/measurements/store]

Writes OUT.json and OUT.md. Schedules have from 20 to 2000 tasks, one in three a constant. Exits with 1 if the 99th
percentile of a lookup is not under 5 ms.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from measuring import ROOT, Times, environment, in_words, row, save, timed

sys.path.insert(0, str(ROOT))

from nimble_jobs.job import Hit
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import Store, open_store, prune
from nimble_jobs.store.home import resolve
from tests.store_samples import PARTS, a_schedule, key_of

LIMIT_MS = 5.0
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
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements" / "store", help="without a suffix")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as folder:
        home = resolve(str(Path(folder) / "home"))
        with open_store(home) as store:
            save_ms, text_bytes = fill(store, options.schedules)
        rows = measure(home, options.schedules)
        rows.insert(0, row("save, with its commit", save_ms))
        database_bytes = (home / "nimble-jobs.db").stat().st_size
    figures = {
        "environment": environment(real_time=os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)),
        "schedules": options.schedules,
        "text_bytes": {"median": statistics.median(text_bytes), "largest": max(text_bytes)},
        "database_bytes": database_bytes,
        "results": rows,
    }
    save(options.out.with_suffix(".json"), figures)
    options.out.with_suffix(".md").write_text(page(figures))
    lookup = next(r for r in rows if r["what"].startswith("lookup, hit"))
    print(f"lookup: median {lookup['median_ms']} ms, 99th percentile {lookup['p99_ms']} ms")
    return 0 if lookup["p99_ms"] < LIMIT_MS else 1


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
        times += timed(partial(store.schedules.save, parts=parts, now=time.time()), [schedule])
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


def touch(store: Store, key: str) -> None:
    """Count a hit, and have it written."""
    store.schedules.touch(key, Hit.STORED, time.time())
    store.schedules.ready(key)


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
        f"The machine's load was {made['load']} at the end; {_TURNS[made['real_time']]}.\n",
        in_words(made),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
