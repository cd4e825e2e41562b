"""Time `claim` with many queued jobs: those that may run, and those that a claim has to pass over.

PYTHONPATH=. python scripts/measure_claims.py [COUNT ...]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from sqlalchemy import insert, text, update
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.tables import GroupRow, JobRow, WaitRow
from tests.store_samples import many_jobs

NOW = 1_800_000_000.0
READY = 40  # jobs behind the others that may run
QUEUED = JobState.QUEUED.value


def _ready(_session: Session, _ids: list[str]) -> None:
    """All may run."""


def _waiting(session: Session, ids: list[str]) -> None:
    """All but the last wait for one that runs."""
    first, *others = ids[:-READY]
    session.execute(insert(WaitRow), [{"job": job, "parent": first} for job in others])
    session.execute(update(JobRow).where(JobRow.id.in_([first])).values(state=JobState.RUNNING.value, worker="w"))
    _all_but_last(session, ids, blockers=1)


def _held(session: Session, ids: list[str]) -> None:
    """All but the last are held."""
    _all_but_last(session, ids, held=True)


def _full_group(session: Session, ids: list[str]) -> None:
    """All but the last are in one group, which is full."""
    session.execute(insert(GroupRow), [{"name": "g", "most": 1}])
    _all_but_last(session, ids, group_name="g")
    session.execute(update(JobRow).where(JobRow.id == ids[0]).values(state=JobState.RUNNING.value, worker="w"))


def _groups(session: Session, ids: list[str]) -> None:
    """All are in one of a hundred groups."""
    session.execute(insert(GroupRow), [{"name": f"g{n}", "most": 2} for n in range(100)])
    session.execute(text("UPDATE jobs SET group_name = 'g' || (seq % 100)"))


def _all_but_last(session: Session, ids: list[str], **values: object) -> None:
    last = set(ids[-READY:])
    session.execute(update(JobRow).values(**values))
    names = list(values)
    plain = {"blockers": 0, "held": False, "group_name": None}
    session.execute(update(JobRow).where(JobRow.id.in_(last)).values(**{name: plain[name] for name in names}))


KINDS: dict[str, Callable[[Session, list[str]], None]] = {
    "all may run": _ready,
    "all but the last 40 wait for another job": _waiting,
    "all but the last 40 are held": _held,
    "all but the last 40 are in a group that is full": _full_group,
    "all are in one of 100 groups": _groups,
}


def _measure(store: Store) -> tuple[float, float]:
    """The median of a claim and the longest, in milliseconds."""
    took = []
    for _ in range(20):
        start = time.perf_counter()
        job = store.jobs.claim("w", device="cpu", now=NOW + 1e7)
        took.append(time.perf_counter() - start)
        assert job is not None
    return 1e3 * statistics.median(took), 1e3 * max(took)


def main() -> None:
    """Print a line for each count and kind."""
    print("| queued jobs | of these | claim, ms | longest, ms |")
    print("|---|---|---|---|")
    for kind, change in KINDS.items():
        for count in map(int, sys.argv[1:] or ("1000", "100000")):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, open_store(resolve(folder)) as store:
                ids = many_jobs(store, count, now=NOW)
                fresh = {"state": QUEUED, "attempt": 0, "worker": None, "priority": 0, "urgency": 0}
                ranked = fresh | {"rank": JobRow.created_at}
                store.jobs._db.write(lambda session, v=ranked: session.execute(update(JobRow).values(**v)))
                store.jobs._db.write(lambda session, c=change, i=ids: c(session, i))
                median, longest = _measure(store)
            print(f"| {count:,} | {kind} | {median:.1f} | {longest:.1f} |", flush=True)


if __name__ == "__main__":
    main()
