"""What happens when two transactions want to change the same things at once, on each database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState
from nimble_jobs.store import Store, new_job, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.tables import JobRow, WaitRow
from nimble_jobs.store.waiting import wait_for
from tests.store_samples import NOW, submit
from tests.waiting import PATIENCE_S

Two = tuple[Store, Store]


@pytest.fixture
def two(tmp_path: Path, url: str | None) -> Iterator[Two]:
    """One database, opened twice."""
    home = resolve(str(tmp_path / "home"))
    with ExitStack() as opened:
        yield opened.enter_context(open_store(home, url)), opened.enter_context(open_store(home, url))


def finish(store: Store, job: str, attempt: int) -> bool:
    return store.jobs.finish(job, attempt, outputs={}, timings={}, schedule={}, now=NOW)


def test_a_parent_ends_while_a_job_that_waits_for_it_is_queued(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent was read as running, and succeeds before the new job is committed: that job runs all the same."""
    one, other = two
    parent = submit(one, "parent")
    assert one.jobs.claim("0-w", device="cpu", now=NOW) is not None
    read, ending = threading.Event(), threading.Event()

    def slowly(session: Session, job: str, parents: Any, now: float) -> None:
        if not read.is_set():
            read.set()
            ending.wait(1.0)  # on a database that lets the parent end now, it has
        wait_for(session, job, parents, now)

    monkeypatch.setattr(new_job, "wait_for", slowly)

    def end() -> bool:
        assert read.wait(PATIENCE_S)
        ended = finish(other, parent.id, 1)
        ending.set()
        return ended

    with ThreadPoolExecutor(2) as threads:
        queued, ended = threads.submit(submit, one, "child", after=["parent"]), threads.submit(end)
        child = queued.result(PATIENCE_S)
        assert ended.result(PATIENCE_S)
    assert one.jobs.awaited([child.id]) == {}
    claimed = one.jobs.claim("0-w", device="cpu", now=NOW)
    assert claimed is not None
    assert claimed.id == child.id


def test_a_wait_for_a_job_that_has_succeeded_is_swept_away(two: Two) -> None:
    """Whatever left it: the waiting job can be claimed afterwards, and is counted off once."""
    one, _ = two
    parent, child = submit(one, "parent"), submit(one, "child")
    assert one.jobs.claim("0-w", device="cpu", now=NOW) is not None
    assert finish(one, parent.id, 1)

    def left(session: Session) -> None:
        session.execute(insert(WaitRow).values(job=child.id, parent=parent.id, when="success"))
        session.execute(update(JobRow).where(JobRow.id == child.id).values(blockers=1))

    one._database.write(left)
    assert one.jobs.claim("0-w", device="cpu", now=NOW) is None
    assert one.jobs.sweep(NOW) == []
    assert one.jobs.sweep(NOW) == []
    claimed = one.jobs.claim("0-w", device="cpu", now=NOW)
    assert claimed is not None
    assert (claimed.id, claimed.state) == (child.id, JobState.RUNNING)


def test_two_who_open_an_empty_database_at_once(tmp_path: Path, url: str | None) -> None:
    """Both find the tables, made once."""
    homes = [resolve(str(tmp_path / "home")) if url is None else resolve(str(tmp_path / str(n))) for n in range(4)]

    def first(home: Path) -> int:
        with open_store(home, url) as store:
            return sum(store.jobs.counts().values())

    with ThreadPoolExecutor(len(homes)) as threads:
        assert list(threads.map(first, homes)) == [0] * len(homes)
