#!/usr/bin/env python3
"""Measure commands, claims and pruning while the queue grows.

    python scripts/bench_queue.py [--jobs 1000 10000 100000] [--quiet-s 10] [--out docs/measurements/queue]

Writes OUT.json and OUT.md. Exits with 1 when a listing of twenty among the most jobs takes over 0.1 s of a processor,
or a claim beside `prune` waits for over 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from measuring import ROOT, environment, in_words, row, save, summary, timed
from sqlalchemy import insert, text, update
from sqlalchemy.orm import Session

sys.path.insert(0, str(ROOT))

from nimble_jobs.cli.main import main as main_command
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import DATABASE, resolve
from nimble_jobs.store.tables import GroupRow, JobRow, WaitRow
from tests.store_samples import many_jobs

LISTING_LIMIT_MS = 100.0
CLAIM_LIMIT_MS = 500.0
WORKERS = 4
JOB_S = 0.25  # how long a worker pretends to compute before each write
CALLS = 10
CLAIMS = 100
READY = 40  # jobs behind those that may not run
OLD_S = 60 * 86400.0


def main() -> int:
    """Measure, write; 0 when listings and claims are quick enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000, 10_000, 100_000], help="how many, each in turn")
    parser.add_argument("--quiet-s", type=float, default=10.0, help="seconds that workers run without a prune")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements" / "queue", help="without a suffix")
    options = parser.parse_args()
    grown = []
    for count in options.jobs:
        with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as folder:
            grown.append({"jobs": count, "rows": measure(Path(folder), count)})
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as folder:
        pruned = measure_prune(Path(folder), options.jobs[-1], options.quiet_s)
    passing = [passing_over(kind, count) for kind in KINDS for count in options.jobs]
    figures = {"environment": environment(), "grown": grown, "passing": passing, "prune": pruned}
    save(options.out.with_suffix(".json"), figures)
    options.out.with_suffix(".md").write_text(page(figures))
    listing = max(r["processor_ms"] for r in grown[-1]["rows"] if r["bounded"])
    claim = pruned["claims"]["beside prune"]["longest_ms"]
    print(f"slowest listing: {listing} ms of a processor; longest claim beside prune: {claim} ms")
    return 0 if listing < LISTING_LIMIT_MS and claim < CLAIM_LIMIT_MS else 1


def measure(folder: Path, count: int) -> list[dict[str, Any]]:
    """Commands and claims among that many jobs."""
    home = folder / "home"
    with open_store(resolve(str(home))) as store:
        ids = many_jobs(store, count, now=time.time() - count)
    data, spec = folder / "x.npy", folder / "job.yaml"
    np.save(data, np.zeros((4, 3, 8, 8), dtype=np.float32))
    spec.write_text(
        "version: 1\nname: small\nkind: score\nmodel: {source: torchvision:resnet18}\n"
        "input: {source: x.npy, format: npy}\noutput: {path: out/small}\n"
    )
    some = ["-n", "20"]
    listings = {
        "ls -n 20": ["ls", *some],
        "ls --json -n 20": ["ls", "--json", *some],
        "ls --filter state=failed -n 20": ["ls", "--filter", "state=failed", *some],
        "ls --filter name=job-3 -n 20": ["ls", "--filter", "name=job-3", *some],
        "ls --filter name='*-3' --filter since=1d -n 20": ["ls", "--filter", "name=*-3", "--filter", "since=1d", *some],
        "ls --sort -finished -n 20": ["ls", "--sort", "-finished", *some],
        "ls --sort -elapsed -n 20": ["ls", "--sort", "-elapsed", *some],
        "ls --filter text='such file' -n 20": ["ls", "--filter", "text=such file", *some],
        "show ID": ["show", ids[count // 2]],
        "submit SPEC": ["submit", str(spec)],
        "worker ls": ["worker", "ls"],
    }
    rows = [command(home, what, words, calls=CALLS) for what, words in listings.items()]
    others = {
        "doctor --no-device": ["doctor", "--no-device"],
        "doctor --no-device --all": ["doctor", "--no-device", "--all"],
        "prune --dry-run": ["prune", "--dry-run"],
        "ls -q, every job": ["ls", "-q"],
        "ls --json, every job": ["ls", "--json"],
    }
    rows += [command(home, what, words, calls=2, bounded=False) for what, words in others.items()]
    with open_store(home) as store:
        claims = timed(lambda _: claim(store), range(min(CLAIMS, count // 10)))
    rows.append(row("claim and finish, with their commits", claims) | {"bounded": False})
    return [r | {"processor_ms": r["processor_median_ms"]} for r in rows]


def command(home: Path, what: str, words: list[str], *, calls: int, bounded: bool = True) -> dict[str, Any]:
    """A line of the table of commands; what they print is thrown away."""

    def call(_: object) -> None:
        with Path(os.devnull).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
            code = main_command(["--home", str(home), *words])
        if code:
            raise RuntimeError(f"{what}: exit code {code}")

    call(None)  # imports what the command needs
    return row(what, timed(call, range(calls))) | {"bounded": bounded}


def claim(store: Store) -> None:
    """Take the next job, and finish it."""
    now = time.time()
    job = store.jobs.claim("w", device="cpu", now=now)
    assert job is not None
    store.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=now)


def _waiting(session: Session, ids: list[str]) -> None:
    first, *others = ids[:-READY]
    session.execute(insert(WaitRow), [{"job": job, "parent": first} for job in others])
    session.execute(update(JobRow).where(JobRow.id != first).values(blockers=1))
    session.execute(update(JobRow).where(JobRow.id == first).values(state=JobState.RUNNING.value, worker="w"))


def _full_group(session: Session, ids: list[str]) -> None:
    session.execute(insert(GroupRow), [{"name": "g", "most": 1}])
    session.execute(update(JobRow).values(group_name="g"))
    session.execute(update(JobRow).where(JobRow.id == ids[0]).values(state=JobState.RUNNING.value, worker="w"))


def _groups(session: Session, _: list[str]) -> None:
    session.execute(insert(GroupRow), [{"name": f"g{n}", "most": 2} for n in range(100)])
    session.execute(text("UPDATE jobs SET group_name = 'g' || (seq % 100)"))


# What keeps jobs from being claimed, and what puts them into that state.
KINDS: dict[str, Callable[[Session, list[str]], object]] = {
    "all may run": lambda _session, _ids: None,
    f"all but the last {READY} wait for another job": _waiting,
    f"all but the last {READY} are held": lambda session, _: session.execute(update(JobRow).values(held=True)),
    f"all but the last {READY} are in a group that is full": _full_group,
    "all are in one of 100 groups": _groups,
}


def passing_over(kind: str, count: int) -> dict[str, Any]:
    """Claims among so many queued jobs, in memory, most of which a claim may have to pass over."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, open_store(resolve(folder)) as store:
        now = time.time() - count
        ids = many_jobs(store, count, now=now)

        def change(session: Session) -> None:
            fresh = {"state": JobState.QUEUED.value, "attempt": 0, "worker": None, "priority": 0, "urgency": 0}
            session.execute(update(JobRow).values(**fresh, rank=JobRow.created_at))
            KINDS[kind](session, ids)
            if "but the last" in kind:
                ready = {"blockers": 0, "held": False, "group_name": None}
                session.execute(update(JobRow).where(JobRow.id.in_(ids[-READY:])).values(**ready))

        def take(_: object) -> None:
            assert store.jobs.claim("w", device="cpu", now=time.time()) is not None

        store.jobs._db.write(change)
        times = timed(take, range(READY // 2))
    return {"jobs": count, **row(kind, times)}


def measure_prune(folder: Path, count: int, quiet_s: float) -> dict[str, Any]:
    """Remove nine of ten jobs while workers take the others."""
    home = folder / "home"
    with open_store(resolve(str(home))) as store:
        ids = many_jobs(store, count, now=time.time() - OLD_S - count)
        age(store, ids[: count * 9 // 10], ids[count * 9 // 10 :])
    before = (home / DATABASE).stat().st_size
    context = multiprocessing.get_context("spawn")
    stop, results, began = context.Event(), context.Queue(), context.Barrier(WORKERS + 1)
    workers = [context.Process(target=work, args=(str(home), began, stop, results)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    began.wait()
    time.sleep(quiet_s)
    start = time.time()
    base = [str(Path(sys.executable).with_name("nimble-jobs")), "--home", str(home), "prune", "--yes", "--json"]
    prune = [*base, "--keep", "30d", "--keep-failed", "30d"]
    done = subprocess.run(prune, capture_output=True, text=True, check=False, cwd=ROOT)
    end = time.time()
    stop.set()
    times = [entry for _ in workers for entry in results.get()]
    for worker in workers:
        worker.join()
    if done.returncode:
        raise RuntimeError(f"prune: exit code {done.returncode}: {done.stderr}")
    phases = {"without": (0.0, start), "beside prune": (start, end)}
    return {
        "told": json.loads(done.stdout),
        "took_s": round(end - start, 1),
        "bytes": {"before": before, "after": (home / DATABASE).stat().st_size},
        **{
            what: {
                phase: summary([t for kind, at, t in times if kind == what and first <= at < last], digits=1)
                for phase, (first, last) in phases.items()
            }
            for what in ("claims", "heartbeats", "ends")
        },
    }


def age(store: Store, old: list[str], new: list[str]) -> None:
    """Let the old ones have ended, and the new ones wait."""

    def work(session: Any) -> None:
        for first in range(0, len(old), 500):
            mine = JobRow.id.in_(old[first : first + 500])
            ended = update(JobRow).where(mine, JobRow.state == JobState.QUEUED.value)
            session.execute(ended.values(state="cancelled", finished_at=JobRow.created_at))
        for first in range(0, len(new), 500):
            session.execute(update(JobRow).where(JobRow.id.in_(new[first : first + 500])).values(state="queued"))

    store.jobs._db.write(work)


def work(home: str, began: Any, stop: Any, results: Any) -> None:
    """Process: take jobs, pretend to run them, and note how long each write took."""
    times: list[tuple[str, float, float]] = []

    def note(kind: str, call: Any) -> Any:
        at, start = time.time(), time.perf_counter()
        value = call()
        times.append((kind, at, (time.perf_counter() - start) * 1e3))
        return value

    with open_store(Path(home)) as store, store.workers.hold({"device": "cpu", "role": "worker"}) as lease:
        began.wait()
        while not stop.is_set():
            now = time.time()
            job = note("claims", lambda now=now: store.jobs.claim(lease.id, device="cpu", now=now))
            if job is None:
                break
            time.sleep(JOB_S)
            note("heartbeats", lambda job=job: store.jobs.progress(job.id, job.attempt, done=1, total=2, bad=0))
            time.sleep(JOB_S)
            ended = {"outputs": {}, "timings": {}, "schedule": {}, "now": now}
            note("ends", lambda job=job, ended=ended: store.jobs.finish(job.id, job.attempt, **ended))
    results.put(times)


def page(figures: dict[str, Any]) -> str:
    """The figures as a page."""
    made, grown, pruned = figures["environment"], figures["grown"], figures["prune"]
    counts = [each["jobs"] for each in grown]
    head = " | ".join(f"{count:,} jobs" for count in counts)
    told = {row["kind"]: row["count"] for row in pruned["told"]["rows"]}
    sizes = pruned["bytes"]
    lines = [
        "# The queue with many jobs\n",
        "    python scripts/bench_queue.py\n",
        "The median time of a command, in milliseconds: on the wall, and in brackets on a processor. It is taken in a",
        "process that has imported what it needs. Of ten jobs one failed, three wait, six succeeded; a spec has",
        "1.4 kB.\n",
        f"| command | {head} |",
        "|---|" + "---|" * len(counts),
    ]
    for at, first in enumerate(grown[0]["rows"]):
        cells = (f"{r['median_ms']:,.0f} ({r['processor_ms']:,.0f})" for r in (each["rows"][at] for each in grown))
        lines.append(f"| {first['what']} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Claims that pass jobs over\n",
        "The database was in memory, so syncing cost nothing.\n",
        "| queued jobs | of these | claim, ms | longest, ms |",
        "|---|---|---|---|",
        *(f"| {r['jobs']:,} | {r['what']} | {r['median_ms']} | {r['longest_ms']} |" for r in figures["passing"]),
        "",
        f"## `prune` beside {WORKERS} workers\n",
        f"{counts[-1]:,} jobs, of which {told.get('jobs', 0):,} ended 60 days ago. {WORKERS} processes claim the",
        f"others, report progress and finish them, {JOB_S * 1e3:.0f} ms between two steps. `prune` took"
        f" {pruned['took_s']:,.0f} s. It removed",
        ", ".join(f"{count:,} {kind}" for kind, count in told.items()) + ".",
        f"The database's file went from {sizes['before'] / 1e6:,.0f} MB to {sizes['after'] / 1e6:,.0f} MB.\n",
        "| a worker's | while | calls | median | 99th percentile | longest |",
        "|---|---|---|---|---|---|",
    ]
    for what in ("claims", "heartbeats", "ends"):
        for phase, r in pruned[what].items():
            lines.append(
                f"| {what} | {phase} | {r['calls']:,} | {r['median_ms']} ms | {r['p99_ms']} ms | {r['longest_ms']} ms |"
            )
    lines += [
        "",
        f"The machine's load was {made['load']} at the end; other work ran on it.",
        in_words(made),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
