"""Hits and misses are counted, and cost neither a transaction of their own nor the turn of another writer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.orm import Session

from nimble_jobs.job import Hit, Publication
from nimble_jobs.store import Store, open_store, totals
from nimble_jobs.store.home import resolve
from nimble_jobs.store.totals import Total
from tests.store_samples import NOW, PARTS, a_schedule, key_of, queued

KEYS = [key_of(name) for name in "abc"]
THREADS, TURNS = 4, 10


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    """A store with three schedules."""
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        for key in KEYS:
            opened.schedules.save(a_schedule(key), parts=PARTS, now=NOW)
        yield opened


def running(store: Store) -> str:
    queued(store, spec={}, name="n", kind="score", now=NOW)
    job = store.jobs.claim("w", device="cpu", now=NOW)
    assert job is not None
    return job.id


def finish(store: Store, job: str, token: str = "a" * 32) -> None:
    publication = Publication(token=token, job_id=job, path="/out", folder="1:2", manifest_sha256="b" * 64)
    assert store.jobs.finish(job, 1, outputs={}, timings={}, schedule={}, publication=publication, now=NOW)


def hit(store: Store, *keys: str) -> None:
    for key in keys:
        store.schedules.touch(key, Hit.RESIDENT, NOW)


@contextmanager
def statements(store: Store) -> Iterator[list[str]]:
    """What is sent to the database inside, without its values."""
    sent: list[str] = []

    def seen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    engine = store._database._engine
    event.listen(engine, "before_cursor_execute", seen)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", seen)


def counters(sent: list[str]) -> list[str]:
    """The tables whose rows are counted up, in order; those of one table that follow each other once."""
    named = [next((t for t in ("schedule_uses", "schedules", "totals") if f" {t} " in s), "") for s in sent]
    return [table for i, table in enumerate(named) if table and table != (["", *named])[i]]


def test_a_resident_job_ends_beside_others(store: Store) -> None:
    """After a hit the look before publication sends what it would send without one, and writes nothing. The transaction
    that records the end counts the hit, right before the totals, whose rows it has to itself anyway, and on PostgreSQL
    shares the lock of all writers.
    """
    plain, resident = running(store), running(store)
    with statements(store) as expected:
        store.publications.key(plain, 1)
    hit(store, KEYS[1], KEYS[0])
    with statements(store) as sent:
        store.publications.key(resident, 1)
    assert sent == expected
    assert [statement.partition(" ")[0] for statement in sent] == ["SELECT"]
    with statements(store) as sent:
        finish(store, resident)
    assert counters(sent)[-3:] == ["schedules", "schedule_uses", "totals"]
    if not store._database.is_sqlite:
        assert [s.partition("pg_advisory_xact_lock")[2].startswith("_shared(") for s in sent if "advisory" in s] == [
            True
        ]
    assert store.schedules.uses().resident == 2


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_the_look_before_publication_waits_for_no_writer(store: Store) -> None:
    """Neither for one that shares the lock of all writers, nor for one that has counted a hit and is not committed, nor
    for one that changes the job's own row.
    """
    job = running(store)
    hit(store, KEYS[0])
    store.schedules.uses()
    with store._database._beside.connect() as other, other.begin():
        other.execute(text("UPDATE schedule_uses SET count = count"))
        other.execute(text("UPDATE schedules SET hits = hits"))
        other.execute(text("UPDATE jobs SET priority = priority"))
        hit(store, KEYS[0])
        store.publications.key(job, 1)


def test_hits_are_counted_whoever_writes_next(store: Store) -> None:
    """By the process's next read, by a transaction that runs alone, also if that removes the schedule, or as the store
    is closed. Those of a schedule that is gone are not.
    """
    hit(store, KEYS[0], KEYS[0])
    assert (store.schedules.get(KEYS[0]).hits, store.schedules.uses().resident) == (2, 2)
    hit(store, KEYS[0])
    store.schedules.remove([KEYS[0]])
    hit(store, KEYS[0])
    store.schedules.missed("no schedule is stored: at all", NOW)
    uses = store.schedules.uses()
    assert (uses.resident, uses.misses) == (3, {"no schedule is stored": 1})
    hit(store, KEYS[1])
    store.close()
    with open_store(store.home, create=False) as again:
        assert again.schedules.uses().resident == 4


def test_a_transaction_that_fails_loses_no_count(store: Store) -> None:
    """What it would have counted, the next one does, once."""
    hit(store, KEYS[0])

    def fails(session: Session) -> None:
        totals.add(session, Total.TICK)
        session.execute(text("SELECT 1"))

    def refuse(_connection: Connection) -> None:
        raise ArithmeticError

    event.listen(store._database._engine, "commit", refuse)
    for beside in (True, False):
        with pytest.raises(ArithmeticError):
            store._database.write(fails, beside=beside)
    event.remove(store._database._engine, "commit", refuse)
    finish(store, running(store))
    assert store.schedules.uses().resident == 1


def test_many_count_at_once_in_any_order(store: Store) -> None:
    """No count is lost, and on PostgreSQL no transaction must be repeated: all lock the rows in one order."""
    repeated: list[str] = []
    stores = [open_store(store.home, store._database.url, create=False) for _ in range(THREADS)]
    together = threading.Barrier(THREADS)

    def work(number: int) -> None:
        mine, busy = stores[number], stores[number]._database._busy

        def noted(error: Exception) -> bool:
            repeated.append(str(error))
            return busy(error)

        mine._database._busy = noted
        for turn in range(TURNS):
            together.wait()
            hit(mine, *(KEYS if (number + turn) % 2 else reversed(KEYS)))
            mine.schedules.missed("odd" if number % 2 else "even", NOW)
            mine.schedules.touch(KEYS[number % 3], Hit.STORED, NOW)
            mine.schedules.uses()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in stores:
        each.close()
    uses = store.schedules.uses()
    assert (uses.resident, uses.stored) == (3 * THREADS * TURNS, THREADS * TURNS)
    assert uses.misses == {"even": THREADS * TURNS // 2, "odd": THREADS * TURNS // 2}
    assert sum(entry.hits for entry in store.schedules.list()) == 4 * THREADS * TURNS
    assert store._database.is_sqlite or not repeated
