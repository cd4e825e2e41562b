#!/usr/bin/env python3
"""Measure claims a second of several processes, on SQLite and on PostgreSQL: small jobs that are claimed and finished.

    python scripts/bench_claims.py --json FILE [--synced] [--jobs 10000] [--workers 8]

The PostgreSQL server is the one that the tests start: on this machine, over a socket. Syncing costs nothing on either
database: the SQLite file is in memory (/dev/shm), and PostgreSQL has fsync off. With --synced every commit waits for
the disk, as users have it. Exits with 1 if a job is claimed twice or not at all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import ROOT, environment, save
from sqlalchemy import text

sys.path.insert(0, str(ROOT))

from nimble_jobs.job import JobState
from nimble_jobs.store import NewJob, open_store
from nimble_jobs.store.home import resolve
from tests import postgres
from tests.postgres_server import SYNCED
from tests.store_samples import folder_in_memory

PROCESSES = multiprocessing.get_context("spawn")
AT_ONCE = 1000  # jobs that are queued in one transaction


def main() -> int:
    """Measure both, write; 0 if each job was claimed once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--synced", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.synced:
        os.environ[SYNCED] = "yes"
    postgres.begin()
    rows = []
    for kind in ("sqlite", "postgresql"):
        rows.append(measure(kind, options.jobs, options.workers, synced=options.synced))
        print(rows[-1], flush=True)
    shown = {"synced": options.synced, "jobs": options.jobs, "workers": options.workers}
    save(options.json, {"environment": environment(options=shown), "rows": rows})
    return 0 if all(row["claimed_once"] == row["jobs"] == row["claims"] for row in rows) else 1


def measure(kind: str, jobs: int, workers: int, *, synced: bool) -> dict[str, Any]:
    """One database: jobs of no group, all queued before the first claim."""
    with database(kind, synced=synced) as (home, url):
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
def database(kind: str, *, synced: bool) -> Iterator[tuple[Path, str | None]]:
    """A state folder, in memory or on the disk, and for PostgreSQL the URL of its database."""
    with tempfile.TemporaryDirectory() if synced else folder_in_memory() as folder:
        home = resolve(str(Path(folder) / "home"))
        if kind == "sqlite":
            yield home, None
            return
        with postgres.schema() as url:
            yield home, url


if __name__ == "__main__":
    sys.exit(main())
