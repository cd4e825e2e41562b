"""Ticks equal a brute-force check of every UTC minute, in ten time zones, through every change of their clocks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.ticks import BadExpression, Expression
from tests import slow_cron

DAY, MINUTE = 86_400, 60
YEARS = {
    "Europe/Berlin": 2024,
    "America/New_York": 2024,
    "Australia/Lord_Howe": 2024,  # half an hour
    "Asia/Kathmandu": 2024,  # a quarter of an hour off, and no changes
    "Africa/Casablanca": 2024,  # back in Ramadan
    "Pacific/Apia": 2010,  # without 30 December 2011
    "America/Havana": 2024,  # midnight comes twice
    "Asia/Beirut": 2022,  # midnight is skipped
    "Antarctica/Troll": 2024,  # two hours
    "Asia/Tehran": 2020,  # gave its summer time up
}  # five years each, from the first of January


def start_of(zone: str) -> int:
    return int(datetime(YEARS[zone], 1, 1, tzinfo=UTC).timestamp())


def changes(zone: str) -> list[int]:
    """The hours of five years in which a zone's UTC offset changes."""
    rules, start = slow_cron.zone_of(zone), start_of(zone)
    hours = range(start, start + 5 * 366 * DAY, 3600)
    offsets = [(at, datetime.fromtimestamp(at, rules).utcoffset()) for at in hours]
    return [before for (before, one), (_, other) in pairwise(offsets) if one != other]


CHANGES = {zone: changes(zone) for zone in YEARS}


def spans(low: int, high: int) -> st.SearchStrategy[str]:
    numbers = st.integers(low, high)
    pairs = st.tuples(numbers, numbers).map(sorted)
    return st.one_of(
        st.just("*"),
        st.integers(2, 20).map(lambda step: f"*/{min(step, high - low)}"),
        numbers.map(str),
        st.lists(numbers, min_size=2, max_size=3, unique=True).map(lambda found: ",".join(map(str, found))),
        pairs.map(lambda pair: f"{pair[0]}-{pair[1]}"),
        st.tuples(pairs, st.integers(1, 5)).map(lambda found: f"{found[0][0]}-{found[0][1]}/{found[1]}"),
    )


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Random expressions, mostly due every day and early in the morning, when clocks change."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(sorted(slow_cron.NAMED)))
    minute = draw(st.one_of(spans(0, 59), st.sampled_from(["0", "30", "0,30", "*/15"])))
    hour = draw(st.one_of(spans(0, 23), spans(0, 3), st.sampled_from(["0", "1", "2", "3", "23", "1,2,3"])))
    day = draw(st.one_of(st.just("*"), spans(1, 31), st.sampled_from(["L", "LW", "1,L"])))
    month = draw(st.one_of(st.just("*"), st.just("*"), spans(1, 12), st.sampled_from(["MAR,OCT", "APR-NOV"])))
    weekday = draw(
        st.one_of(
            st.just("*"), st.just("*"), spans(0, 7), st.sampled_from(["MON-FRI", "SAT-SUN", "SUN", "0L", "SUN#1"])
        )
    )
    return f"{minute} {hour} {day} {month} {weekday}"


def possible(text: str) -> bool:
    try:
        Expression.parse(text, "UTC")
    except BadExpression:
        return False
    return True


def pieces(expression: Expression, asked: Sequence[int]) -> Iterator[int]:
    """The ticks that a process sees if it looks only at these moments: at each one, all ticks since the last."""
    for since, until in pairwise(asked):
        yield from takewhile(lambda tick: tick <= until, expression.after(since))  # noqa: B023 - used up at once


@settings(deadline=None)
@given(
    st.data(),
    st.sampled_from(sorted(YEARS)),
    expressions().filter(possible),
    st.lists(st.integers(1, 6 * DAY - 1), max_size=5),
)
def test_ticks_are_those_of_every_minute(data: st.DataObject, zone: str, text: str, absences: list[int]) -> None:
    """Holds for six days around a clock change, or at a random time, with looks at any distance from each other."""
    anywhere = st.integers(0, 5 * 365 - 6).map(lambda day: start_of(zone) + (day + 3) * DAY)
    around = data.draw(st.one_of(st.sampled_from(CHANGES[zone]), anywhere) if CHANGES[zone] else anywhere)
    first = around - 3 * DAY
    last = first + 6 * DAY - MINUTE
    (slow,) = slow_cron.ticks([text], zone, first, last)
    expression = Expression.parse(text, zone)
    asked = [first - 1, *sorted(first + seconds for seconds in absences), last]
    assert list(pieces(expression, asked)) == slow
    for earlier, tick in pairwise(slow[-12:]):
        assert expression.before(tick) == earlier


@pytest.mark.timeout(1200)  # with --all it looks at 2.6 million minutes
@pytest.mark.parametrize("zone", sorted(YEARS))
def test_five_years(zone: str, request: pytest.FixtureRequest) -> None:
    """Compares all ticks of five years, for fixed expressions that clock changes affect most, and for random ones.

    Without --all, compares four days around six clock changes, for the fixed expressions alone.
    """
    complete = request.config.getoption("--all")
    texts = ["30 2 * * *", "0 0 * * *", "*/30 * * * *", "15 1-3 * * SUN", "0 */2 * * *", "59 23 L * *"]
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    while complete and len(texts) < 10:
        text = " ".join(
            chance.choice(some)
            for some in (
                ["*", "*/7", "0", "30", "15,45", "0-20/5"],
                ["*", "*/3", "0", "2", "1-3", "22,23", "0-4/2"],
                ["*", "*", "*/2", "1", "10-20", "L", "LW"],
                ["*", "*", "3,10", "4-11"],
                ["*", "*", "SUN", "MON-FRI", "0L", "SAT#4"],
            )
        )
        texts += [text] if possible(text) else []
    start = start_of(zone)
    end = start + 5 * 365 * DAY
    parts = [(start, end)] if complete else [(at - 2 * DAY, at + 2 * DAY) for at in CHANGES[zone][:6]]
    for first, last in parts or [(start, start + 4 * DAY)]:
        for text, slow in zip(texts, slow_cron.ticks(texts, zone, first, last), strict=True):
            ticks = takewhile(lambda tick: tick <= last, Expression.parse(text, zone).after(first - 1))  # noqa: B023
            assert list(ticks) == slow, (seed, zone, text)
