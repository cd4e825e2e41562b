"""Ticks on demand: `cron trigger` and `cron backfill`. The clock is an argument."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nimble_jobs.errors import NotFound, UsageError
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.timers import backfill, trigger
from tests.timers import DAY, HOUR, MINUTE, NOON, add, end, fire, rows, start


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "work"


def test_trigger(store: Store, folder: Path) -> None:
    """`trigger` submits a job now, even if one is running or the timer is paused. It replaces no scheduled tick."""
    add(store, folder)
    fire(store, NOON + HOUR)
    first = trigger(store, "nightly", now=NOON + HOUR + 5.5)
    store.timers.pause("nightly", NOON + HOUR + 6)
    second = trigger(store, "nightly", now=NOON + HOUR + 5.5)  # within the same second
    assert [tick.due - NOON - HOUR for tick in (first, second)] == [5, 6]
    assert {tick.kind.value for tick in (first, second)} == {"manual"}
    assert len(store.jobs.list()) == 3
    with pytest.raises(NotFound, match="timer daily: no such timer"):
        trigger(store, "daily", now=NOON)


def test_trigger_at_a_whole_minute_leaves_the_tick_free(store: Store, folder: Path) -> None:
    """A manual tick in the minute of a scheduled one gets another second, so that the scheduled tick still fires."""
    add(store, folder, overlap="allow")
    assert trigger(store, "nightly", now=NOON + HOUR).due == NOON + HOUR + 1
    (tick,) = fire(store, NOON + HOUR)
    assert (tick.due, tick.outcome) == (NOON + HOUR, "submitted")


def test_backfill(store: Store, folder: Path) -> None:
    """Past ticks without a job get one, the oldest first and one at a time. Ticks that ran stay as they are."""
    add(store, folder, grace="1m")
    fire(store, NOON + HOUR)
    fire(store, NOON + 3.5 * HOUR)
    now = NOON + 3.6 * HOUR
    assert [outcome for *_, outcome in rows(store)] == ["submitted", "missed", "missed"]
    plan = backfill(store, "nightly", since=NOON - HOUR, until=now, dry_run=True, now=now)
    assert [(tick.due - NOON) // HOUR for tick in plan.ticks] == [-1, 0, 1, 2, 3]
    assert [tick.runs for tick in plan.ticks] == [True, True, False, True, True]
    assert [outcome for *_, outcome in rows(store)] == ["submitted", "missed", "missed"]
    assert backfill(store, "nightly", since=NOON - HOUR, until=now, now=now) == plan
    ran = []
    for _ in range(4):
        fire(store, now)
        fire(store, now)
        job = next(job for job in store.jobs.list()[::-1] if job.state == "queued" and job.created_at > NOON + 2 * HOUR)
        ran.append(job.spec["output"]["path"][-4:])
        store.jobs.cancel(job.id, now)
    assert ran == ["1100", "1200", "1400", "1500"]
    assert rows(store)[3] == (2, "backfill", "submitted")
    assert len(store.jobs.list()) == 5
    ticks = store.timers.ticks("nightly")
    assert (ticks[0].reason or "").startswith("was missed: no process fired it in time (30m late; grace: 1m)")


def test_backfills_run_beside_the_timer(store: Store, folder: Path) -> None:
    """Backfills neither skip scheduled ticks nor wait for them. At most `max_running` backfill jobs exist at once."""
    add(store, folder)
    backfill(store, "nightly", since=NOON - 5 * HOUR, until=NOON, max_running=2, now=NOON + 60)
    assert len(fire(store, NOON + 60)) == 2
    (tick,) = fire(store, NOON + HOUR)
    assert (tick.kind, tick.outcome) == ("scheduled", "submitted")
    done = start(store, store.jobs.list()[-1].id, NOON + HOUR)
    end(store, done, NOON + HOUR)
    assert len(fire(store, NOON + HOUR)) == 1


def test_backfill_of_a_paused_timer(store: Store, folder: Path) -> None:
    """A pause does not stop a backfill, because somebody asked for it."""
    add(store, folder)
    store.timers.pause("nightly", NOON + 1)
    backfill(store, "nightly", since=NOON, until=NOON + 3 * HOUR, now=NOON + 2.5 * HOUR)
    assert [tick.due for tick in fire(store, NOON + 2.5 * HOUR)] == [NOON]
    assert [tick.outcome.value for tick in store.timers.ticks("nightly")] == ["waiting", "waiting", "submitted"]


def test_ticks_are_taken_out_of_a_row_for_several(store: Store, folder: Path) -> None:
    """One row may stand for many ticks. After a backfill of its first, a middle or its last tick, each counts once."""
    add(store, folder, expression="* * * * *")
    fire(store, NOON + 2 * DAY)
    row = store.timers.ticks("nightly")[-1]
    assert (row.due, row.count) == (NOON + MINUTE, 1000)
    for minute in (1, 2, 500, 1000):
        at = NOON + minute * MINUTE
        plan = backfill(store, "nightly", since=at, until=at, now=NOON + 2 * DAY)
        assert plan.ticks[0].before is not None
        assert plan.ticks[0].before.count > 1
    ticks = {tick.due: tick for tick in store.timers.ticks("nightly")}
    cut = ticks[int(NOON) + 3 * MINUTE]
    assert (cut.until, cut.count) == (NOON + 1000 * MINUTE, 996)
    assert sum(tick.count for tick in ticks.values()) == 2 * 1440


def test_bad_backfills(store: Store, folder: Path) -> None:
    """A bad request raises an error and changes nothing."""
    add(store, folder, expression="* * * * *")
    now = NOON + 30 * DAY
    with pytest.raises(UsageError, match=r"nightly: no tick from 2027-03-01 12:00:10 UTC to .*; expected a range"):
        backfill(store, "nightly", since=NOON + 10, until=NOON + 20, now=now)
    with pytest.raises(UsageError, match=r"nightly: no tick since 2027-03-31 12:01 UTC has passed yet; expected"):
        backfill(store, "nightly", since=now + 60, until=now + 120, now=now)
    with pytest.raises(UsageError, match=r"more than 10,000 ticks from .*; expected a shorter range"):
        backfill(store, "nightly", since=NOON - 30 * DAY, until=NOON, now=now)
    with pytest.raises(UsageError, match="--max-running: found 0; expected at least 1"):
        backfill(store, "nightly", since=NOON, until=NOON, max_running=0, now=now)
    assert store.timers.ticks("nightly") == []
