"""What keeps jobs with very many shards and members going: nothing reads all rows, and no member waits for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import Job
from nimble_jobs.store import Left, Store, open_store, shards
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads.stragglers import pause_s
from tests.store_samples import NOW, queued

SHARDS = [(first, first + 10) for first in range(0, 100, 10)]


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    """A new store."""
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def begun(store: Store) -> Job:
    """A job that worker `a` has claimed and opened."""
    queued(store, spec={"version": 1, "run": {"gpus": 3}}, name="n", kind="score", now=NOW)
    job = store.jobs.claim("a", device="cuda:0", now=NOW)
    assert job is not None
    store.shards.open(job, "cuda:0", SHARDS, (), bad=0, now=NOW)
    return job


def joined(store: Store, worker: str) -> Job:
    job = store.shards.join(worker, "cuda:1", NOW)
    assert job is not None
    return job


def sent(store: Store, work: Callable[[], object]) -> list[tuple[str, Any]]:
    """The statements that the store sends."""
    found: list[tuple[str, Any]] = []

    def see(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        found.append((statement, parameters))

    engine = store._database._engine
    event.listen(engine, "before_cursor_execute", see)
    work()
    event.remove(engine, "before_cursor_execute", see)
    return found


@pytest.mark.parametrize("at_once", [3, 100])
def test_shards_are_opened_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A later attempt keeps what is known of each, and drops what the job no longer has."""
    monkeypatch.setattr(shards, "_AT_ONCE", at_once)
    lead = begun(store)
    joined(store, "b")
    failing = store.shards.claim(lead, NOW, idle=True)
    assert store.shards.leave(lead, now=NOW, error="odd") is Left.NOTHING
    store.jobs.requeue(lead.id, 1, reason="stopped", now=NOW)
    again = store.jobs.claim("c", device="cuda:0", now=NOW)
    assert again is not None
    store.shards.open(again, "cuda:0", SHARDS[:7], {5}, bad=2, now=NOW)
    counts = store.shards.counts(again)
    assert (counts.open, counts.done) == (6, 1)
    found = store.jobs.get(lead.id)
    assert (found.records_done, found.records_bad, found.records_total) == (10, 2, 70)
    assert store.shards.records_left(again) == 60
    taken: list[int] = []
    while claims := store.shards.claim(again, NOW, idle=False):
        taken += [claim.index for claim in claims]
    assert taken == [2, 3, 4, 6]
    assert [claim.index for claim in failing] == [0, 1]


def test_nobody_joins_before_all_shards_are_open(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale attempt opens none of those that are left."""
    monkeypatch.setattr(shards, "_AT_ONCE", 3)
    queued(store, spec={"version": 1, "run": {"gpus": 3}}, name="n", kind="score", now=NOW)
    job = store.jobs.claim("a", device="cuda:0", now=NOW)
    assert job is not None
    write, calls = store._database.write, 0

    def interrupted(work: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            assert store.shards.join("b", "cuda:1", NOW) is None
            write(lambda session: work(session), **more)
            store.jobs.requeue(job.id, 1, reason="stopped", now=NOW)
            return None
        return write(work, **more)

    monkeypatch.setattr(store._database, "write", interrupted)
    with pytest.raises(FencedOut):
        store.shards.open(job, "cuda:0", SHARDS, (), bad=0, now=NOW)
    assert store.shards.counts(job).open == 9


def test_what_is_left(store: Store) -> None:
    """Whether shards are open, whether some are worked on, and how many records they have."""
    lead = begun(store)
    assert store.shards.unfinished(lead) == (True, False)
    while claims := store.shards.claim(lead, NOW, idle=True):
        assert store.shards.unfinished(lead)[1]
        for claim in claims:
            assert store.shards.records_left(lead) == 100 - claim.start
            store.shards.finish(lead, claim.index, 0, NOW)
    assert store.shards.unfinished(lead) == (False, False)
    assert store.shards.records_left(lead) == 0


def test_a_dead_member_is_counted_once(store: Store) -> None:
    """However many workers notice its death at the same time."""
    lead = begun(store)
    joined(store, "b")

    def alive(worker: str) -> bool:
        if worker == "a":  # meanwhile another one takes it from the job
            store.shards.recover(lambda each: each != "a", NOW)
        return worker != "a"

    store.shards.recover(alive, NOW)
    assert {m.worker: m.failures for m in store.shards.members(lead.id)} == {"a": 1, "b": 0}
    assert [e.kind for e in store.jobs.events(lead.id)].count("member") == 2


def test_progress_of_followers_is_not_written(store: Store) -> None:
    """Only the leading member writes the job's; a new phase of its own each member writes once."""
    lead = begun(store)
    other = joined(store, "b")
    leading, following = store.membership(lead), store.membership(other)

    def writes(membership: Any) -> int:
        def report() -> None:
            assert membership.progress(lead.id, 1, done=1, total=9, bad=0, phase="run")

        return sum(statement.startswith("UPDATE") for statement, _ in sent(store, report))

    assert [writes(following) for _ in range(3)] == [1, 0, 0]
    assert [bool(writes(leading)) for _ in range(3)] == [True] * 3
    assert not following.progress(lead.id, 2, done=1, total=9, bad=0, phase="run")
    store.shards.leave(lead, now=NOW)
    assert writes(following) > 0


def test_no_statement_of_a_member_reads_all_shards(tmp_path: Path) -> None:
    """SQLite looks each up in an index, and sorts none but those in hand."""
    with open_store(resolve(str(tmp_path / "home"))) as store:
        lead = begun(store)
        other = joined(store, "b")
        held = store.shards.claim(lead, NOW, idle=True)

        def work() -> None:
            store.shards.unfinished(other)
            store.shards.claim(other, NOW, idle=False)
            store.shards.finish(lead, held[0].index, 0, NOW)
            store.shards.second(replace(other, worker="c"), held[1].index, NOW, idle=True)
            store.shards.leave(lead, now=NOW, error="odd")

        with store._database._engine.connect() as connection:
            plans = [
                row.detail
                for statement, parameters in sent(store, work)
                if "shards" in statement and statement.startswith(("SELECT", "UPDATE"))
                for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
        assert len(plans) > 8
        assert not [plan for plan in plans if plan.startswith("SCAN shards") or "TEMP B-TREE" in plan]


@pytest.mark.parametrize(("members", "seconds"), [(2, 0.1), (10, 0.1), (1000, 10.0)])
def test_idle_members_look_in_turns(members: int, seconds: float) -> None:
    """All of them together a hundred times a second, and the one that is to publish as often as alone."""
    assert pause_s(members, leads=False, chance=0.5) == seconds
    assert pause_s(members, leads=False, chance=0.0) == seconds / 2
    assert pause_s(members, leads=True, chance=0.0) == 0.1
