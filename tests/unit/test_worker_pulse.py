"""The link between a running attempt and the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nimble_jobs.errors import FencedOut, StoreError
from nimble_jobs.job import BadKind, Job
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.pulse import Pulse
from nimble_jobs.workloads.context import Stop
from tests.store_samples import queued
from tests.waiting import until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(resolve(str(tmp_path)))
    yield opened
    opened.close()


@pytest.fixture
def job(store: Store) -> Job:
    """A job that this test runs."""
    queued(store, spec={}, name="n", kind="score", now=1.0)
    claimed = store.jobs.claim("w", device="cpu", now=2.0)
    assert claimed
    return claimed


def test_reports_are_carried_in_the_background(store: Store, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report costs no write; the newest values arrive by themselves."""
    real, writers = store.jobs.progress, set[str]()

    def progress(*args: Any, **values: Any) -> bool:
        writers.add(threading.current_thread().name)
        return real(*args, **values)

    monkeypatch.setattr(store.jobs, "progress", progress)
    with Pulse(store.jobs, job, interval_s=0.02) as pulse:
        pulse.report(phase="run", total=10)
        for done in range(8):
            pulse.report(done=done)
        until(lambda: store.jobs.get(job.id).records_done == 7)
        found = store.jobs.get(job.id)
        assert (found.phase, found.records_total) == ("run", 10)
    assert writers == {f"pulse-{job.id}"}


def test_flush_writes_the_last_values(store: Store, job: Job) -> None:
    """The end of an attempt does not wait for the next beat, and writes nothing twice."""
    with Pulse(store.jobs, job, interval_s=60) as pulse:
        pulse.report(done=3, bad=1, schedule={"hit": "miss"}, timings={"build_s": 2.0})
        pulse.flush()
        found = store.jobs.get(job.id)
    assert (found.records_done, found.records_bad) == (3, 1)
    assert (found.schedule, found.timings) == ({"hit": "miss"}, {"build_s": 2.0})


def test_bad_records_by_kind_stay_with_their_attempt(store: Store, job: Job) -> None:
    """The newest ones, also after reports without any, and after the attempt has failed."""
    kinds = [BadKind(reason="is null", count=2, first="x.csv:7"), BadKind(reason="\udc80", count=1, first="x.csv:9")]
    with Pulse(store.jobs, job, interval_s=60) as pulse:
        pulse.report(bad=1, bad_kinds=[BadKind(reason="is null", count=1, first="x.csv:7")])
        pulse.flush()
        pulse.report(bad=3, bad_kinds=kinds)
        pulse.report(done=9)
        pulse.flush_soon()
        store.jobs.fail(job.id, job.attempt, error="too many", retry=False, now=3.0)
        pulse.report(bad=4, bad_kinds=kinds[:1])
        with pytest.raises(FencedOut):
            pulse.flush()
    (attempt,) = store.jobs.attempts(job.id)
    assert attempt.bad_kinds == (kinds[0], replace(kinds[1], reason="\\udc80"))
    assert store.jobs.get(job.id).records_bad == 3


def test_the_last_counts_go_with_the_end(store: Store, job: Job) -> None:
    """What no beat has written costs no commit of its own: the next transaction, that of the end, writes it."""
    with Pulse(store.jobs, job, interval_s=60) as pulse:
        pulse.report(phase="run", done=1)
        pulse.report(phase="publish", done=3)
        pulse.flush_soon()
        store.jobs.event("note", "the next transaction", job.id, job.attempt, now=3.0)
        found = store.jobs.get(job.id)
    assert (found.phase, found.records_done) == ("publish", 3)


def test_a_beat_writes_events(store: Store, job: Job) -> None:
    """Also if no count has changed. So a process that dies after a long run loses the events since the last beat."""
    with Pulse(store.jobs, job, interval_s=0.05), open_store(store.home, create=False) as other:
        store.jobs.event_soon("note", "said once", job.id, job.attempt, {}, now=3.0)
        until(lambda: any(event.kind == "note" for event in other.jobs.events(job.id)))


def test_a_late_report_of_a_lost_attempt_changes_nothing(store: Store, job: Job) -> None:
    """What goes with another transaction is fenced as well."""
    with Pulse(store.jobs, job, interval_s=60) as pulse:
        pulse.report(phase="publish", done=3)
        pulse.flush_soon()
        store.jobs.fail(job.id, job.attempt, error="lost", retry=True, lost=True, now=3.0)
        pulse.report(phase="publish", done=4)
        pulse.flush_soon()
        store.jobs.event("note", "the next transaction", now=3.0)
    assert (store.jobs.get(job.id).phase, store.jobs.get(job.id).records_done) == (None, 3)


def test_a_lost_attempt_hears_of_it(store: Store, job: Job) -> None:
    """The beat finds out, and the computing thread is told when it next asks."""
    with Pulse(store.jobs, job, interval_s=0.05) as pulse:
        assert pulse.stop() is Stop.GO
        store.jobs.fail(job.id, job.attempt, error="lost", retry=True, lost=True, now=3.0)
        pulse.report(done=1)
        until(lambda: pulse._fenced)
        with pytest.raises(FencedOut):
            pulse.stop()


def test_a_cancelled_job_hears_of_it(store: Store, job: Job) -> None:
    """`stop` says CANCEL within a beat, and that goes before every other wish."""
    with Pulse(store.jobs, job, wish=lambda: Stop.DRAIN, interval_s=0.05) as pulse:
        assert pulse.stop() is Stop.DRAIN
        store.jobs.cancel(job.id, now=3.0)
        until(lambda: pulse.stop() is not Stop.DRAIN)
        assert pulse.stop() is Stop.CANCEL


def test_timeout(store: Store, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` says TIMEOUT once the job's time is over."""
    now = 50.0
    monkeypatch.setattr("nimble_jobs.worker.pulse.time", SimpleNamespace(monotonic=lambda: now))
    with Pulse(store.jobs, replace(job, timeout_s=0.1), interval_s=60) as pulse:
        assert pulse.stop() is Stop.GO
        now = 50.15
        assert pulse.stop() is Stop.TIMEOUT


def test_every_report_is_seen(store: Store, job: Job) -> None:
    """`on_report` gets all values so far, each time."""
    seen: list[dict[str, Any]] = []
    with Pulse(store.jobs, job, on_report=seen.append, interval_s=60) as pulse:
        pulse.report(phase="run", total=4)
        pulse.report(done=2)
    assert seen == [
        {"phase": "run", "done": 0, "total": 4, "bad": 0},
        {"phase": "run", "done": 2, "total": 4, "bad": 0},
    ]


def test_trouble_with_the_store_is_no_failure(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Progress that cannot be written is kept, said once, and written when the store is back."""
    real = store.jobs.progress
    broken, refused = True, 0

    def progress(*args: Any, **values: Any) -> bool:
        nonlocal refused
        if broken:
            refused += 1
            raise StoreError("no space left")
        return real(*args, **values)

    monkeypatch.setattr(store.jobs, "progress", progress)
    with Pulse(store.jobs, job, interval_s=0.02) as pulse:
        pulse.report(done=5)
        until(lambda: refused > 3)
        assert pulse.stop() is Stop.GO
        broken = False
        until(lambda: store.jobs.get(job.id).records_done == 5)
    assert len([r for r in caplog.records if "no space left" in r.message]) == 1
