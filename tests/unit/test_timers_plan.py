"""Which ticks are fired and which are missed. The planning functions are pure: every time is an argument."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.spec.model import CronSpec
from nimble_jobs.timers.plan import AT_ONCE, JOBS_AT_ONCE, PUNCTUAL_S, Plan, plan
from nimble_jobs.timers.rhythm import Rhythm
from tests.timers import DAY, HOUR, MINUTE, NOON


def of(expression: str = "0 * * * *", **fields: Any) -> tuple[Rhythm, CronSpec]:
    cron = CronSpec(expression=expression, **fields)
    return Rhythm.of("nightly", cron), cron


def planned(now: float, *, next_due: float = NOON, taken: tuple[float, ...] = (), **fields: Any) -> Plan:
    rhythm, cron = of(**fields)
    return plan(rhythm, cron, next_due=int(next_due), now=now, taken={int(tick) for tick in taken})


def fired(found: Plan) -> list[float]:
    return [each.due for each in found.verdicts if each.missed is None]


def missed(found: Plan) -> list[float]:
    return [each.due for each in found.verdicts if each.missed is not None]


@pytest.mark.parametrize(
    ("late_s", "kind"), [(0, "scheduled"), (30, "scheduled"), (31, "catch-up"), (3599, "catch-up")]
)
def test_a_single_late_tick_is_fired(late_s: float, kind: str) -> None:
    """By default a tick may start until the next one is due."""
    (verdict,) = planned(NOON + late_s).verdicts
    assert (verdict.due, verdict.missed, verdict.kind) == (NOON, None, kind)


def test_after_an_absence_latest_fires_the_last() -> None:
    """The earlier ticks are missed, each with a reason."""
    found = planned(NOON + 5 * HOUR + 100)
    assert fired(found) == [NOON + 5 * HOUR]
    assert missed(found) == [NOON + n * HOUR for n in range(5)]
    assert found.verdicts[0].missed == "no process fired it before the next one was due (catch_up: latest)"
    assert found.then is not None
    assert (found.then.tick, found.more) == (NOON + 6 * HOUR, False)


def test_after_an_absence_all_fires_each() -> None:
    """If there is a `grace`, only ticks within it fire."""
    assert len(fired(planned(NOON + 5 * HOUR + 100, catch_up="all"))) == 6
    found = planned(NOON + 5 * HOUR + 100, catch_up="all", grace=2 * HOUR)
    assert fired(found) == [NOON + 4 * HOUR, NOON + 5 * HOUR]
    assert found.verdicts[0].missed == "no process fired it in time (5h1m40s late; grace: 2h)"


def test_after_an_absence_none_fires_what_is_on_time() -> None:
    """On time means at most 30 s late, or within `grace` if there is one."""
    assert fired(planned(NOON + 5 * HOUR + PUNCTUAL_S, catch_up="none")) == [NOON + 5 * HOUR]
    assert fired(planned(NOON + 5 * HOUR + PUNCTUAL_S + 1, catch_up="none")) == []
    assert fired(planned(NOON + 5 * HOUR + 600, catch_up="none", grace=600.0)) == [NOON + 5 * HOUR]


def test_grace_bounds_the_latest_too() -> None:
    """The latest tick is missed too if it is eleven minutes late and `grace` is ten, so nothing runs."""
    assert fired(planned(NOON + 660, grace=600.0)) == []
    assert fired(planned(NOON + 600, grace=600.0)) == [NOON]


def test_ticks_that_have_rows_are_passed_over() -> None:
    """A tick with a row, from before the clock was set back or from a backfill, gets no second verdict."""
    found = planned(NOON + 2 * HOUR + 5, taken=(NOON, NOON + 2 * HOUR))
    assert [each.due for each in found.verdicts] == [NOON + HOUR]
    assert found.then is not None
    assert found.then.tick == NOON + 3 * HOUR


def test_jitter_moves_the_start_only() -> None:
    """Jitter delays the start of a tick's job. The tick itself keeps its time."""
    rhythm, cron = of(jitter=600.0)
    due = rhythm.due(int(NOON))
    assert 0 < due.at - NOON < 600
    assert plan(rhythm, cron, next_due=int(NOON), now=due.at - 0.01).verdicts == ()
    (verdict,) = plan(rhythm, cron, next_due=int(NOON), now=due.at).verdicts
    assert verdict.due == NOON


def test_close_ticks_with_jitter_both_run() -> None:
    """Jitter may start two jobs within seconds of each other. Both ticks then count as on time."""
    rhythm, cron = of("* * * * *", jitter=59.0)
    pairs = [(rhythm.due(t), rhythm.due(t + MINUTE)) for t in range(int(NOON), int(NOON) + DAY, MINUTE)]
    early, late = min(pairs, key=lambda pair: pair[1].at - pair[0].at)
    assert late.at - early.at < 20
    found = plan(rhythm, cron, next_due=early.tick, now=late.at)
    assert fired(found) == [early.tick, late.tick]


def test_start_and_end_bound_the_ticks() -> None:
    """A bound that matches the expression is a tick itself. After `end`, nothing is due."""
    rhythm, cron = of(start="2027-03-01T14:00", end="2027-03-01T15:30", timezone="Europe/Berlin")
    first = rhythm.first(NOON - 7200)
    assert first is not None
    assert first.tick == NOON + HOUR  # 14:00 in Berlin
    found = plan(rhythm, cron, next_due=first.tick, now=NOON + 10 * HOUR)
    assert (missed(found), fired(found), found.then) == ([NOON + HOUR], [NOON + 2 * HOUR], None)


def test_days_of_minutes_are_bounded() -> None:
    """A thousand missed ticks share one row. Together with the rows of the last ones, each tick is counted once."""
    rhythm, cron = of("* * * * *")
    next_due, now, rows, count, parts = int(NOON), NOON + 5 * DAY, 0, 0, 0
    while True:
        found = plan(rhythm, cron, next_due=next_due, now=now)
        rows += len(found.verdicts)
        count += sum(each.count for each in found.verdicts)
        parts += 1
        assert found.then is not None
        next_due = found.then.tick
        if not found.more:
            break
        (one,) = found.verdicts
        assert one.until == one.due + (AT_ONCE - 1) * MINUTE
        assert one.missed is not None
        assert one.missed.startswith("no process fired these 1000 ticks; ")
    assert count == 5 * 1440 + 1
    assert (parts, rows) == (8, 7 + 201)
    assert fired(found) == [now]


def test_all_takes_few_jobs_at_once() -> None:
    """One transaction submits at most JOBS_AT_ONCE jobs, and says that more are due."""
    found = planned(NOON + 100 * HOUR, catch_up="all")
    assert fired(found) == [NOON + n * HOUR for n in range(JOBS_AT_ONCE)]
    assert found.more
    assert found.then is not None
    assert found.then.tick == NOON + JOBS_AT_ONCE * HOUR


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["* * * * *", "*/7 * * * *", "0 * * * *", "30 2 * * *"]),
    st.sampled_from(["latest", "all", "none"]),
    st.one_of(st.none(), st.floats(0, 7200)),
    st.sampled_from([0.0, 45.0, 900.0]),
    st.lists(st.floats(0, 40000), min_size=1, max_size=5),
)
def test_no_tick_twice_and_none_lost(
    expression: str, catch_up: str, grace: float | None, jitter: float, waits: list[float]
) -> None:
    """Whenever a worker looks, each tick up to then has exactly one verdict, and the next one lies in the future."""
    rhythm, cron = of(expression, catch_up=catch_up, grace=grace, jitter=jitter, timezone="Europe/Berlin")
    now, seen = NOON, []
    first = rhythm.first(now)
    assert first is not None
    due = first
    for wait in waits:
        now += wait
        more = True
        while more and due.at <= now:
            found = plan(rhythm, cron, next_due=due.tick, now=now)
            for each in found.verdicts:
                last = each.until or each.due
                between = _until(rhythm, each.due - 1, last)
                assert len(between) == each.count
                seen += between
            assert found.then is not None
            due, more = found.then, found.more
        assert due.at > now
    assert seen == _until(rhythm, NOON, due.tick - 1)


def _until(rhythm: Rhythm, first: float, last: float) -> list[int]:
    found = []
    for tick in rhythm.after(first):
        if tick > last:
            return found
        found.append(tick)
    return found
