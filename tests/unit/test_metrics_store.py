"""Metrics about timers, notifications, workers and schedules, and what a scrape reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import Session

from nimble_jobs import metrics
from nimble_jobs.errors import StoreTrouble
from nimble_jobs.job import Hit
from nimble_jobs.metrics.labels import REASONS
from nimble_jobs.metrics.work import JOB_KINDS
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store, figures, open_store
from nimble_jobs.store.home import DATABASE, resolve
from tests import timers
from tests.configured import configure
from tests.metrics import counters, scraped, value
from tests.store_samples import NOW, PARTS, a_schedule, key_of, many_jobs, submit
from tests.timers import HOUR, NOON
from tests.unit.test_store_migrations import of_version


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def test_kinds() -> None:
    """The kinds of jobs that metrics know are the kinds that specs know."""
    assert get_args(JobSpec.model_fields["kind"].annotation) == JOB_KINDS


def test_ticks_and_timers(store: Store, tmp_path: Path) -> None:
    """Each outcome counts; the last success stays after its job and its ticks are gone."""
    timers.add(store, tmp_path, overlap="queue")
    assert value(scraped(store, NOON + HOUR + 90), "timer_lateness_seconds", timer="nightly") == 90
    (first,) = timers.fire(store, NOON + HOUR)
    assert first.job is not None
    timers.fire(store, NOON + 2 * HOUR)  # waits for the first
    samples = scraped(store, NOON + 2 * HOUR)
    assert value(samples, "ticks_total", outcome="submitted") == 1
    assert value(samples, "ticks_waiting") == 1
    assert value(samples, "timer_lateness_seconds", timer="nightly") == 0
    assert ("nimble_jobs_timer_last_success_timestamp_seconds", (("timer", "nightly"),)) not in samples
    timers.end(store, timers.start(store, first.job, NOON + 2 * HOUR), NOON + 2 * HOUR + 5)
    samples = scraped(store, NOON + 2 * HOUR + 5)
    assert value(samples, "timer_last_success_timestamp_seconds", timer="nightly") == NOON + 2 * HOUR + 5
    timers.fire(store, NOON + 2 * HOUR + 10)
    samples = scraped(store, NOON + 2 * HOUR + 10)
    assert value(samples, "ticks_total", outcome="submitted") == 2
    assert value(samples, "ticks_waiting") == 0
    (second,) = (tick.job for tick in store.timers.ticks("nightly", limit=1))
    assert second is not None
    job = timers.start(store, second, NOON + 3 * HOUR - 10)
    store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, empty=True, now=NOON + 3 * HOUR - 5)
    before = scraped(store, NOON + 3 * HOUR - 5)
    assert value(before, "ticks_total", outcome="empty") == 1
    store.timers.pause("nightly", NOON + 3 * HOUR)
    store.timers.remove("nightly", NOON + 3 * HOUR)
    after = scraped(store, NOON + 3 * HOUR)
    assert counters(after) == counters(before)
    assert value(after, "timers", state="active") == 0


def test_skipped_and_missed_ticks(store: Store, tmp_path: Path) -> None:
    """A row that stands for several missed ticks counts as many."""
    timers.add(store, tmp_path, catch_up="latest")
    ticks = timers.fire(store, NOON + 50 * HOUR + 60)
    samples = scraped(store, NOON + 50 * HOUR + 60)
    assert value(samples, "ticks_total", outcome="submitted") == 1
    assert value(samples, "ticks_total", outcome="missed") == 49
    assert sum(tick.count for tick in ticks) == 50
    timers.fire(store, NOON + 51 * HOUR)
    samples = scraped(store, NOON + 51 * HOUR)
    assert value(samples, "ticks_total", outcome="skipped") == 1  # the job of the last tick has not run


def test_notifications(store: Store) -> None:
    """Those that wait, with the age of the oldest; those that were sent and given up stay counted when pruned."""
    configure(store.home, "notify: {webhook: 'http://localhost:1/x', hosts: ['localhost:1'], on: [failed]}\n")
    for name in ("a", "b", "c"):
        job = submit(store, name, now=NOW, max_attempts=1)
        store.jobs.claim("w", device="cpu", now=NOW)
        store.jobs.fail(job.id, 1, error="no", retry=False, now=NOW)
    samples = scraped(store, NOW + 30)
    assert value(samples, "notifications_pending") == 3
    assert value(samples, "notifications_oldest_age_seconds") == 30
    first, second = store.outbox.lease("w", NOW + 30, lease_s=10)
    assert store.outbox.sent(first.id, NOW + 31)
    assert not store.outbox.sent(first.id, NOW + 31)  # another sender had the lease, too
    assert store.outbox.failed(second, "refused", next_at=None, now=NOW + 31)
    samples = scraped(store, NOW + 31)
    assert value(samples, "notifications_pending") == 1
    assert value(samples, "notifications_given_up") == 1
    assert value(samples, "notifications_total", channel="webhook", outcome="sent") == 1
    assert value(samples, "notifications_total", channel="webhook", outcome="given_up") == 1
    while store.outbox.prune_some(NOW + 10**6):
        pass
    after = scraped(store, NOW + 31)
    assert value(after, "notifications_given_up") == 0
    assert counters(after) == counters(samples)


def test_workers_and_residents(store: Store) -> None:
    """By the number of their lock, with their state, what they hold, and how long their job has stood still."""
    with store.workers.hold({"role": "worker", "device": "cuda:0", "status": "ready"}) as lease:
        store.schedules.set_residents(lease.id, {"k1:a": 100, "k1:b": 50, "k2": 7})
        samples = scraped(store, NOW)
        at = {"worker": "0", "device": "cuda:0"}
        assert value(samples, "workers", state="idle") == 1
        assert value(samples, "resident_schedules", **at) == 2
        assert value(samples, "resident_bytes", **at) == 157
        assert value(samples, "timer_processes") == 1
        lease.update(job="j", moved_at=0.0)
        samples = scraped(store, NOW)
        assert value(samples, "worker_stall_seconds", **at) > 0
        lease.update(status="whatever", job=None, moved_at=None)
        assert value(scraped(store, NOW), "workers", state="unknown") == 1
    assert value(scraped(store, NOW), "workers", state="unknown") == 0


def test_schedules_and_their_bytes(store: Store) -> None:
    """An artifact that two schedules share takes its bytes once; an import is no build."""
    shared = b"x" * 1000
    for name in ("a", "b"):
        store.schedules.save(a_schedule(key_of(name), constant=shared, build_s=3.0), parts=PARTS, now=NOW)
    store.schedules.save(a_schedule(key_of("c"), build_s=9.0), parts=PARTS, now=NOW, origin={"host": "other"})
    store.schedules.touch(key_of("a"), Hit.RESIDENT, NOW)
    samples = scraped(store, NOW)
    assert value(samples, "store_bytes", part="artifacts") == 1000
    assert value(samples, "store_bytes", part="json") == sum(e.bytes for e in store.schedules.list()) - 2000
    assert value(samples, "build_duration_seconds_count") == 2
    assert value(samples, "build_duration_seconds_sum") == 6
    assert value(samples, "schedule_uses_total", hit="resident", reason="") == 1
    store.schedules.quarantine(key_of("a"), "damaged", NOW)
    assert value(scraped(store, NOW), "schedules", state="quarantined") == 1


def test_many_reasons(store: Store) -> None:
    """The first ones by name have a label, the rest is added up."""
    for n in range(REASONS + 5):
        store.schedules.missed(f"reason {n:03}", NOW)
    samples = scraped(store, NOW)
    reasons = {
        labels[1][1] for name, labels in samples if name == "nimble_jobs_schedule_uses_total" and labels[0][1] == "miss"
    }
    assert len(reasons) == REASONS + 1
    assert value(samples, "schedule_uses_total", hit="miss", reason="other") == 5


def test_a_scrape_reads_no_job(store: Store) -> None:
    """Each query about jobs is answered by an index alone, in a store of many jobs."""
    many_jobs(store, 2000, now=NOW)
    samples = scraped(store, NOW + 3000)
    assert value(samples, "jobs", state="failed", kind="score") == 200
    assert value(samples, "jobs", state="queued", kind="score") == 600
    queries = {"state": figures.jobs_by_state(), "due": figures.due_jobs(NOW), "held": figures.held_jobs()}
    for name, query in queries.items():
        text = query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})

        def plan(session: Session, text: object = text) -> list[str]:
            return [row[3] for row in session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]

        steps = store._database.read(plan)
        assert any("COVERING INDEX ix_jobs_figures" in step for step in steps), (name, steps)
        assert not any(step.startswith("SCAN jobs") and "COVERING" not in step for step in steps), (name, steps)


def test_a_locked_store(tmp_path: Path) -> None:
    """The error says so, after the patience that the store was opened with."""
    home = resolve(str(tmp_path / "home"))
    open_store(home).close()
    with (
        open_store(home, busy_timeout_s=0.05, patience_s=0.1) as store,
        closing(sqlite3.connect(home / DATABASE, isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreTrouble, match="locked by another process"):
            metrics.exposition(store)
        other.execute("ROLLBACK")
        assert metrics.exposition(store)


def test_totals_survive_a_retried_transaction(store: Store) -> None:
    """A transaction that fails leaves nothing behind for the next one."""
    job = submit(store, now=NOW)

    def fails(session: Session) -> None:
        figures.totals.add(session, figures.totals.Total.BUILD, seconds=5.0)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store._database.write(fails)
    store.jobs.cancel(job.id, NOW)
    assert value(scraped(store, NOW), "build_duration_seconds_count") == 0


def test_a_store_of_an_earlier_version(tmp_path: Path) -> None:
    """Its counters begin at zero, and a retry of an old job does not add what was done before; successes are kept."""
    home = resolve(str(tmp_path / "home"))
    of_version("0012", home / DATABASE)
    with closing(sqlite3.connect(home / DATABASE, isolation_level=None)) as old:
        old.execute(
            "INSERT INTO jobs (id, name, kind, state, priority, attempt, max_attempts, device, foreground, after,"
            " not_before, cancel_requested, created_at, finished_at, records_done, records_bad, allow_python,"
            " spec_digest, spec, schedule, timings, outputs) VALUES ('j', 'n', 'score', 'succeeded', 0, 1, 3, 'cpu', 0,"
            " '[]', 0, 0, 1, ?, 500, 0, '[]', '', '{}', '{}', '{}', '{}')",
            (NOW - 5,),
        )
        old.execute(
            "INSERT INTO timers (name, state, since, moved_at, created_at, edited_at, file, base, allow_python, digest,"
            " spec) VALUES ('n', 'active', 0, 0, 0, 0, 'f', '/', '[]', '', '{}')"
        )
        old.execute(
            "INSERT INTO ticks (timer, due, kind, outcome, job, at) VALUES ('n', 1, 'manual', 'submitted', 'j', 1)"
        )
    with open_store(home) as store:
        samples = scraped(store, NOW)
        assert value(samples, "jobs", state="succeeded", kind="score") == 1
        assert value(samples, "timer_last_success_timestamp_seconds", timer="n") == NOW - 5
        assert set(counters(samples).values()) == {0}
        with closing(sqlite3.connect(home / DATABASE)) as again:
            assert again.execute("SELECT records_done, records_counted FROM jobs").fetchall() == [(500, 500)]
