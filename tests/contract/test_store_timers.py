"""Timers and ticks as the store keeps them. Time is an argument."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nimble_jobs.errors import NotFound
from nimble_jobs.store import (
    Due,
    NewJob,
    Store,
    Tick,
    TickKind,
    TickOutcome,
    Timer,
    TimerChange,
    TimerState,
    open_store,
)
from nimble_jobs.store.firing import Planned, Turn
from nimble_jobs.store.home import resolve
from nimble_jobs.store.open_jobs import Standing
from tests.store_samples import queued

NOW = 1_800_000_000.0  # a whole minute
MINUTE = 60


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def next_minute(timer: Timer) -> Due:
    tick = int(timer.since // MINUTE + 1) * MINUTE
    return Due(tick=tick, at=float(tick))


def add(store: Store, name: str = "nightly", *, now: float = NOW, **spec: object) -> tuple[Timer, TimerChange]:
    return store.timers.add(name=name, spec={"version": 1, **spec}, file="s.yaml", base="/", first=next_minute, now=now)


def job(name: str = "nightly") -> NewJob:
    return NewJob(spec={"version": 1}, name=name, kind="score")


def run_all(_planned: Planned, _there: Standing) -> Turn:
    return Turn(outcome=TickOutcome.SUBMITTED)


def then(timer: Timer, ticks: int = 1) -> Due:
    assert timer.next_due is not None
    return Due(tick=timer.next_due + ticks * MINUTE, at=float(timer.next_due + ticks * MINUTE))


def fire(store: Store, timer: Timer, now: float) -> list[Tick] | None:
    assert timer.next_due is not None
    planned = [Planned(due=timer.next_due, kind=TickKind.SCHEDULED, job=job(timer.name))]
    return store.timers.fire(timer, planned, then(timer), run_all, now)


def test_an_equal_spec_changes_nothing(store: Store) -> None:
    """Adding it again later neither moves `since` nor the next tick, even of a paused timer."""
    first, change = add(store)
    assert (change, first.since, first.next_due) == (TimerChange.ADDED, NOW, NOW + MINUTE)
    assert add(store, now=NOW + 500) == (first, TimerChange.UNCHANGED)
    paused = store.timers.pause("nightly", NOW + 600)
    assert add(store, now=NOW + 700) == (paused, TimerChange.UNCHANGED)


def test_an_edit_begins_anew(store: Store) -> None:
    """What was due before an edit is not fired; a paused timer stays paused."""
    add(store)
    edited, change = add(store, now=NOW + 1000, seed=1)
    assert (change, edited.since, edited.next_due) == (TimerChange.EDITED, NOW + 1000, NOW + 1020)
    assert (edited.created_at, edited.edited_at) == (NOW, NOW + 1000)
    store.timers.pause("nightly", NOW + 1001)
    edited, _ = add(store, now=NOW + 2000, seed=2)
    assert (edited.state, edited.next_due) == (TimerState.PAUSED, None)


def test_a_resumed_timer_begins_anew(store: Store) -> None:
    """A pause of an hour leaves nothing to fire; resuming an active timer changes nothing."""
    active, _ = add(store)
    assert store.timers.resume("nightly", next_minute, NOW + 30) == active
    paused = store.timers.pause("nightly", NOW + 100)
    assert (paused.state, paused.next_due) == (TimerState.PAUSED, None)
    assert store.timers.due(NOW + 3600, slack_s=60) == []
    resumed = store.timers.resume("nightly", next_minute, NOW + 3601)
    assert (resumed.since, resumed.next_due) == (NOW + 3601, NOW + 3660)


def test_the_second_who_fires_changes_nothing(store: Store) -> None:
    """Two processes read the same timer; one tick, one job."""
    timer, _ = add(store)
    ticks = fire(store, timer, NOW + 61)
    assert ticks is not None
    assert [(tick.due, tick.outcome) for tick in ticks] == [(NOW + 60, TickOutcome.SUBMITTED)]
    assert fire(store, timer, NOW + 61) is None
    assert [tick.job for tick in store.timers.ticks("nightly")] == [found.id for found in store.jobs.list()]
    assert store.timers.get("nightly").next_due == NOW + 120
    assert store.timers.tick_of(ticks[0].job or "") == ticks[0]


@pytest.mark.parametrize("change", ["pause", "edit", "remove"])
def test_a_timer_that_changed_meanwhile_does_not_fire(store: Store, change: str) -> None:
    """Whoever read it before the change cannot fire it after."""
    timer, _ = add(store)
    match change:
        case "pause":
            store.timers.pause("nightly", NOW + 61)
        case "edit":
            add(store, now=NOW + 61, seed=1)
        case "remove":
            store.timers.remove("nightly", NOW + 61)
    assert fire(store, timer, NOW + 62) is None
    assert store.jobs.list() == []
    assert store.timers.ticks("nightly") == []


def test_a_taken_key_is_said_in_the_row(store: Store) -> None:
    """The tick gets no job of its own, and the timer goes on."""
    timer, _ = add(store)
    taken = queued(store, spec={"version": 1}, name="other", kind="score", key="k", now=NOW)
    same = NewJob(spec={"version": 1}, name="nightly", kind="score", key="k")
    other = NewJob(spec={"version": 2}, name="nightly", kind="score", key="k")
    dues = (int(NOW) + 60, int(NOW) + 120)
    planned = [
        Planned(due=due, kind=TickKind.SCHEDULED, job=each) for due, each in zip(dues, (same, other), strict=True)
    ]
    ticks = store.timers.fire(timer, planned, then(timer, 2), run_all, NOW + 121)
    assert ticks is not None
    assert [tick.outcome for tick in ticks] == [TickOutcome.SKIPPED, TickOutcome.ERROR]
    assert all(taken.id in (tick.reason or "") for tick in ticks)
    assert len(store.jobs.list()) == 1


def test_timers_that_are_due(store: Store) -> None:
    """A due tick, or one that waits; those due for longest first."""
    early, _ = add(store, "early")
    add(store, "late", now=NOW + 100)
    assert store.timers.due(NOW + 59, slack_s=600) == []
    assert [timer.name for timer in store.timers.due(NOW + 500, slack_s=600)] == ["early", "late"]
    waits = Planned(due=int(NOW) + 60, kind=TickKind.SCHEDULED, job=job("early"))
    store.timers.fire(early, [waits], then(early, 1000), lambda *_: Turn(outcome=TickOutcome.WAITING), NOW + 61)
    assert [timer.name for timer in store.timers.due(NOW + 62, slack_s=600)] == ["early"]


def test_ticks_that_wait_do_not_outlive_their_spec(store: Store) -> None:
    """An edit or a pause skips them, and says so."""
    timer, _ = add(store)
    waits = Planned(due=int(NOW) + 60, kind=TickKind.SCHEDULED, job=job())
    store.timers.fire(timer, [waits], then(timer), lambda *_: Turn(outcome=TickOutcome.WAITING), NOW + 61)
    store.timers.pause("nightly", NOW + 70)
    (tick,) = store.timers.ticks("nightly")
    assert (tick.outcome, tick.reason) == (TickOutcome.SKIPPED, "the timer was paused")


def test_removing_a_timer_keeps_its_jobs(store: Store) -> None:
    """Its ticks go with it; an unknown timer is an error."""
    timer, _ = add(store)
    fire(store, timer, NOW + 61)
    store.timers.remove("nightly", NOW + 62)
    assert (store.timers.list(), store.timers.ticks("nightly"), len(store.jobs.list())) == ([], [], 1)
    for act in (store.timers.get, lambda name: store.timers.remove(name, NOW)):
        with pytest.raises(NotFound, match="timer nightly: no such timer"):
            act("nightly")


def test_last_ticks(store: Store) -> None:
    """The newest one of each timer that has any."""
    for name in ("a", "b", "c"):
        timer, _ = add(store, name)
        if name != "c":
            fire(store, timer, NOW + 61)
    fire(store, store.timers.get("b"), NOW + 121)
    assert {name: tick.due for name, tick in store.timers.last_ticks().items()} == {"a": NOW + 60, "b": NOW + 120}


def test_prune(store: Store) -> None:
    """Old ticks go, but the newest few, those that wait, and those whose jobs have not ended."""
    timer, _ = add(store)
    for number in range(1, 11):
        fire(store, timer, NOW + number * MINUTE)
        timer = store.timers.get("nightly")
    jobs = {tick.due: tick.job or "" for tick in store.timers.ticks("nightly")}
    for due, name in jobs.items():
        if due != NOW + 2 * MINUTE:
            store.jobs.cancel(name, NOW)
    assert store.timers.prune_some_ticks("nightly", NOW + 8 * MINUTE, 5) == 4
    left = [int(tick.due - NOW) // MINUTE for tick in store.timers.ticks("nightly")]
    assert left == [10, 9, 8, 7, 6, 2]
    assert store.timers.prune_some_ticks("nightly", NOW + 8 * MINUTE, 0) == 2


def test_the_clock_was_set_back(store: Store) -> None:
    """What nobody ran comes again; what was submitted does not."""
    timer, _ = add(store)
    missed = [
        Planned(due=int(NOW) + n * MINUTE, kind=TickKind.SCHEDULED, outcome=TickOutcome.MISSED, reason="late")
        for n in range(1, 10)
    ]
    last = Planned(due=int(NOW) + 10 * MINUTE, kind=TickKind.CATCH_UP, job=job())
    store.timers.fire(timer, [*missed, last], then(timer, 10), run_all, NOW + 600, absent=True)
    false = store.timers.get("nightly")
    assert store.timers.due(NOW + 500, slack_s=600) == []
    assert [timer.name for timer in store.timers.due(NOW + 500, slack_s=60)] == ["nightly"]
    assert store.timers.due(NOW - 1, slack_s=60) == []  # before the absence: that clock is not believed
    back = Due(tick=int(NOW) + 180, at=NOW + 180)
    assert store.timers.rewind(false, back, {}, NOW + 125)
    assert [int(tick.due - NOW) // MINUTE for tick in store.timers.ticks("nightly")] == [10, 2, 1]
    again = store.timers.get("nightly")
    assert (again.next_due, again.moved_at) == (NOW + 180, NOW + 125)
    assert store.timers.taken(again) == {int(NOW) + 600}
    assert not store.timers.rewind(again, back, {}, NOW - 1)
    assert not store.timers.rewind(false, back, {}, NOW + 125)
