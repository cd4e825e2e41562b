#!/usr/bin/env python3
"""Measure claims a second of several processes, on SQLite and on PostgreSQL: small jobs that are claimed and finished.

    python scripts/bench_claims.py [--jobs 10000] [--workers 8] [--out docs/measurements/claims-postgresql]

The PostgreSQL server is the one that the tests start: on this machine, over a socket, with fsync off. The SQLite file
is in memory (/dev/shm), so syncing costs nothing on either. Exits with 1 if a job is claimed twice or not at all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import ROOT, environment, in_words, save
from sqlalchemy import text

sys.path.insert(0, str(ROOT))

from nimble_jobs.job import JobState
from nimble_jobs.store import NewJob, open_store
from nimble_jobs.store.home import resolve
from tests import postgres
from tests.store_samples import folder_in_memory

PROCESSES = multiprocessing.get_context("spawn")
AT_ONCE = 1000  # jobs that are queued in one transaction


def main() -> int:
    """Measure both, write; 0 if each job was claimed once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements" / "claims-postgresql")
    options = parser.parse_args()
    postgres.begin()
    rows = [measure(kind, options.jobs, options.workers) for kind in ("sqlite", "postgresql")]
    figures = {"environment": environment(), "rows": rows}
    save(options.out.with_suffix(".json"), figures)
    options.out.with_suffix(".md").write_text(page(figures))
    for row in rows:
        print(row)
    return 0 if all(row["claimed_once"] == row["jobs"] == row["claims"] for row in rows) else 1


def measure(kind: str, jobs: int, workers: int) -> dict[str, Any]:
    """One database: jobs of no group, all queued before the first claim."""
    with database(kind) as (home, url):
        if url is not None:
            os.environ["NIMBLE_JOBS_DB"] = url
        try:
            with open_store(home) as store:
                for first in range(0, jobs, AT_ONCE):
                    new = [
                        NewJob(spec={"name": "n"}, name="n", kind="score") for _ in range(min(AT_ONCE, jobs - first))
                    ]
                    store.jobs.queue_array(new, time.time())
                if url is not None:  # as the server does by itself after a while
                    store._database.write(lambda session: session.execute(text("ANALYZE")))
                go, results = PROCESSES.Event(), PROCESSES.Queue()
                started = [PROCESSES.Process(target=work, args=(str(home), go, results)) for _ in range(workers)]
                for process in started:
                    process.start()
                for _ in started:
                    results.get()
                begun = time.monotonic()
                go.set()
                answers = [results.get() for _ in started]
                seconds = time.monotonic() - begun
                for process in started:
                    process.join()
                counts = store.jobs.counts()
        finally:
            os.environ.pop("NIMBLE_JOBS_DB", None)
    claims = Counter(job for mine, _ in answers for job in mine)
    waits_ms = sorted(1000 * each for _, waited in answers for each in waited)
    return {
        "database": kind,
        "jobs": jobs,
        "workers": workers,
        "claims": claims.total(),
        "claimed_once": sum(times == 1 for times in claims.values()),
        "succeeded": counts[JobState.SUCCEEDED],
        "seconds": round(seconds, 1),
        "jobs_per_s": round(jobs / seconds),
        "claim_median_ms": round(waits_ms[len(waits_ms) // 2], 2),
        "claim_p99_ms": round(waits_ms[len(waits_ms) * 99 // 100], 1),
        "claim_longest_ms": round(waits_ms[-1], 1),
    }


def work(home: str, go: Any, results: Any) -> None:
    """Process: claim and finish jobs until none is left; put what was claimed, and the seconds of each claim."""
    with open_store(Path(home)) as store, store.workers.hold({"device": "cpu"}) as lease:
        results.put(None)
        go.wait()
        mine: list[str] = []
        waited: list[float] = []
        while True:
            begun = time.perf_counter()
            job = store.jobs.claim(lease.id, device="cpu", now=time.time(), expected=True)
            if job is None:
                if not store.jobs.counts()[JobState.QUEUED]:
                    break
                continue
            waited.append(time.perf_counter() - begun)
            mine.append(job.id)
            store.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=time.time())
        results.put((mine, waited))


@contextmanager
def database(kind: str) -> Iterator[tuple[Path, str | None]]:
    """A state folder in memory, and for PostgreSQL the URL of its database."""
    with folder_in_memory() as folder:
        home = resolve(str(Path(folder) / "home"))
        if kind == "sqlite":
            yield home, None
            return
        with postgres.schema() as url:
            yield home, url


def page(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "# Claims on SQLite and on PostgreSQL",
        "",
        "    python scripts/bench_claims.py",
        "",
        "Processes claim small jobs and finish them at once. Syncing cost nothing on either database: the SQLite file "
        "was in memory, and PostgreSQL ran on the same machine with `fsync` off. The processes and the server shared "
        "its cores.",
        "",
        "| database | jobs | processes | claimed once | jobs/s | claim, median ms | 99 % ms | longest ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        lines.append(
            f"| {row['database']} | {row['jobs']:,} | {row['workers']} | {row['claimed_once']:,} | {row['jobs_per_s']} "
            f"| {row['claim_median_ms']} | {row['claim_p99_ms']} | {row['claim_longest_ms']} |"
        )
    made = figures["environment"]
    return "\n".join([*lines, "", f"Load of the machine: {made['load']}. {in_words(made)}", ""])


if __name__ == "__main__":
    sys.exit(main())
