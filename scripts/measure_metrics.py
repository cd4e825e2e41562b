"""How long a scrape of a large store takes, with the index of figures and without it."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the samples of the tests

from nimble_jobs import metrics
from nimble_jobs.metrics import Gpus
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.timer_tables import TimerRow
from tests.store_samples import NOW, PARTS, a_schedule, key_of, many_jobs

ROUNDS = 20


def fill(store: Store, jobs: int, timers: int, schedules: int) -> None:
    """Jobs in all states, timers that nothing fires, and schedules."""
    for first in range(0, jobs, 10_000):
        many_jobs(store, min(10_000, jobs - first), now=NOW + first)

    def add(session: Session) -> None:
        session.add_all(
            TimerRow(
                name=f"timer-{n:05}",
                state="active",
                since=NOW,
                next_due=int(NOW),
                next_at=NOW,
                moved_at=NOW,
                created_at=NOW,
                edited_at=NOW,
                file="timer.yaml",
                base="/",
                allow_python="[]",
                digest="",
                spec="x" * 1500,
                last_success_at=NOW,
            )
            for n in range(timers)
        )

    store._database.write(add)
    for n in range(schedules):
        store.schedules.save(a_schedule(key_of(str(n))), parts=PARTS, now=NOW)


def scrape(store: Store) -> str:
    """Medians of several scrapes: time by the clock, and time of the processor."""
    gpus, took = Gpus(), []
    for _ in range(ROUNDS):
        start = time.perf_counter(), time.process_time()
        metrics.exposition(store, gpus=gpus, now=NOW)
        took.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    gpus.close()
    wall_s, cpu_s = (statistics.median(each) for each in zip(*took, strict=True))
    return f"{wall_s * 1e3:.1f} ms, {cpu_s * 1e3:.1f} ms of CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--timers", type=int, default=10_000)
    parser.add_argument("--schedules", type=int, default=1_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_store(resolve(f"{folder}/home")) as store:
        fill(store, given.jobs, given.timers, given.schedules)
        print(f"with ix_jobs_figures:    {scrape(store)}")
        store._database.write(lambda session: session.execute(text("DROP INDEX ix_jobs_figures")))
        print(f"without ix_jobs_figures: {scrape(store)}")


if __name__ == "__main__":
    main()
