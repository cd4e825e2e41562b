"""Metrics about jobs: what is counted, and that no counter goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs.job import Hit, JobState
from nimble_jobs.retention import Rules, Sweep
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.metrics import counters, scraped, value
from tests.store_samples import NOW, PARTS, a_schedule, key_of, submit


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(resolve(str(tmp_path / "home")))


def test_an_empty_store(store: Store) -> None:
    """Counts are 0, rather than absent, so that rates begin with the first job."""
    samples = scraped(store, NOW)
    for kind in ("score", "finetune"):
        assert value(samples, "jobs", state="queued", kind=kind) == 0
        assert value(samples, "jobs_ended_total", state="failed", kind=kind) == 0
        assert value(samples, "attempt_duration_seconds_sum", outcome="lost", kind=kind) == 0
        assert value(samples, "oldest_due_job_age_seconds", kind=kind) == 0
    assert value(samples, "workers", state="idle") == 0
    assert value(samples, "database_bytes") == (store.home / "nimble-jobs.db").stat().st_size
    assert not any("gpu" in name or "group" in name for name, _ in samples)


def test_what_waits(store: Store) -> None:
    """Only jobs that may start now are due: not held, delayed or waiting for others."""
    first = submit(store, "first", now=NOW)
    submit(store, "later", not_before=NOW + 50, now=NOW)
    submit(store, "child", after=[first.id], now=NOW)
    store.jobs.hold([submit(store, "held", now=NOW).id], NOW)
    samples = scraped(store, NOW + 40)
    assert value(samples, "jobs", state="queued", kind="score") == 4
    assert value(samples, "jobs_due", kind="score") == 1
    assert value(samples, "jobs_held") == 1
    assert value(samples, "oldest_due_job_age_seconds", kind="score") == 40
    assert value(samples, "jobs_submitted_total", kind="score") == 4
    store.jobs.cancel(first.id, NOW)  # the child is skipped with it
    samples = scraped(store, NOW + 60)
    assert value(samples, "jobs_due", kind="score") == 1
    assert value(samples, "oldest_due_job_age_seconds", kind="score") == 10  # a delay is not waiting
    assert value(samples, "jobs_ended_total", state="cancelled", kind="score") == 2


def test_attempts_and_records(store: Store) -> None:
    """A record counts once for its job, as soon as it is done; each attempt counts, with its seconds."""
    job = submit(store, now=NOW, max_attempts=3)
    assert store.jobs.claim("w", device="cpu", now=NOW) is not None
    store.jobs.progress(job.id, 1, done=50, total=100, bad=0)
    assert value(scraped(store, NOW + 1), "records_done_total", kind="score") == 50
    assert store.jobs.fail(job.id, 1, error="lost", retry=True, lost=True, now=NOW + 7) is JobState.QUEUED
    assert value(scraped(store, NOW + 8), "records_done_total", kind="score") == 50
    assert store.jobs.claim("w", device="cpu", now=NOW + 1000) is not None
    store.jobs.progress(job.id, 2, done=20, total=100, bad=0)  # it repeats some
    assert value(scraped(store, NOW + 1001), "records_done_total", kind="score") == 50
    store.jobs.progress(job.id, 2, done=100, total=100, bad=0)
    assert value(scraped(store, NOW + 1002), "records_done_total", kind="score") == 100
    assert store.jobs.finish(job.id, 2, outputs={}, timings={"replays": 9}, schedule={}, now=NOW + 1003)
    samples = scraped(store, NOW + 1004)
    assert value(samples, "records_done_total", kind="score") == 100
    assert value(samples, "replays_total", kind="score") == 9
    assert value(samples, "attempt_duration_seconds_count", kind="score", outcome="lost") == 1
    assert value(samples, "attempt_duration_seconds_sum", kind="score", outcome="lost") == 7
    assert value(samples, "attempt_duration_seconds_sum", kind="score", outcome="succeeded") == 3
    assert value(samples, "jobs_ended_total", kind="score", state="succeeded") == 1


def test_a_clock_that_was_set_back(store: Store) -> None:
    """An attempt that ended before it began took no time, and no age is below zero."""
    job = submit(store, now=NOW)
    assert store.jobs.claim("w", device="cpu", now=NOW) is not None
    submit(store, "b", now=NOW)
    samples = scraped(store, NOW - 500)
    assert value(samples, "oldest_due_job_age_seconds", kind="score") == 0
    store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, now=NOW - 500)
    samples = scraped(store, NOW - 500)
    assert value(samples, "attempt_duration_seconds_sum", kind="score", outcome="succeeded") == 0
    assert value(samples, "attempt_duration_seconds_count", kind="score", outcome="succeeded") == 1


def test_no_counter_goes_back(store: Store) -> None:
    """Neither when jobs are retried or pruned, nor when schedules are removed."""
    before: dict[object, float] = {}

    def look(now: float) -> None:
        after = counters(scraped(store, now))
        assert all(after[key] >= known for key, known in before.items())
        before.update(after)

    look(NOW)
    failed = submit(store, "failed", now=NOW, max_attempts=1)
    store.jobs.claim("w", device="cpu", now=NOW)
    store.jobs.progress(failed.id, 1, done=70, total=100, bad=0)
    look(NOW + 1)
    store.jobs.fail(failed.id, 1, error="no", retry=False, now=NOW + 2)
    look(NOW + 2)
    store.jobs.retry([failed.id], now=NOW + 3)
    look(NOW + 3)
    store.jobs.claim("w", device="cpu", now=NOW + 4)
    look(NOW + 4)
    store.jobs.progress(failed.id, 2, done=100, total=100, bad=0)
    look(NOW + 5)
    store.jobs.finish(failed.id, 2, outputs={}, timings={}, schedule={}, now=NOW + 6)
    look(NOW + 6)
    key = key_of("k")
    store.schedules.save(a_schedule(key, build_s=12.5), parts=PARTS, now=NOW)
    store.schedules.touch(key, Hit.STORED, NOW)
    store.schedules.missed("no schedule is stored under this key", NOW)
    look(NOW + 7)
    store.schedules.remove([key])
    look(NOW + 8)
    far = NOW + 1e9
    Sweep(store, Rules(keep_s=1.0, keep_failed_s=1.0), far, remove=True, sleep=lambda _: None).run()
    assert store.jobs.list() == []
    look(far)
    samples = scraped(store, far)
    assert value(samples, "jobs", state="succeeded", kind="score") == 0
    assert value(samples, "jobs_ended_total", state="succeeded", kind="score") == 1
    assert value(samples, "jobs_ended_total", state="failed", kind="score") == 1
    assert value(samples, "records_done_total", kind="score") == 100
    assert value(samples, "schedules", state="ready") == 0
    assert value(samples, "build_duration_seconds_sum") == 12.5
    assert value(samples, "build_saved_seconds_total") == 12.5
    assert value(samples, "schedule_uses_total", hit="stored", reason="") == 1
    reason = "no schedule is stored under this key"
    assert value(samples, "schedule_uses_total", hit="miss", reason=reason) == 1
