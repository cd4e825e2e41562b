"""Cron expressions, time zones, templates and dates of timers: their meaning, and the errors for wrong ones."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.ticks import (
    BadExpression,
    BadMoment,
    BadTemplate,
    BadTick,
    BadZone,
    Expression,
    jitter_s,
    parse_moment,
    placeholders,
    render,
)


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def after(expression: str, zone: str, start: str, count: int) -> list[str]:
    """The next ticks, as local times of the zone."""
    parsed = Expression.parse(expression, zone)
    found = islice(parsed.after(at(start)), count)
    return [datetime.fromtimestamp(tick, parsed.zone).isoformat(timespec="minutes") for tick in found]


def test_a_skipped_time_is_due_after_the_gap_and_a_repeated_one_once() -> None:
    assert after("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", 2) == [
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:30+02:00",
    ]
    assert after("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", 2) == [
        "2026-10-25T02:30+02:00",
        "2026-10-26T02:30+01:00",
    ]


def test_several_skipped_times_are_one_tick() -> None:
    assert after("0,30 2,3 * * *", "Europe/Berlin", "2026-03-28T12:00", 3) == [
        "2026-03-29T03:00+02:00",
        "2026-03-29T03:30+02:00",
        "2026-03-30T02:00+02:00",
    ]


def test_a_rhythm_goes_on_through_clock_changes() -> None:
    assert after("*/30 * * * *", "Europe/Berlin", "2026-10-24T23:59", 6) == [
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:30+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T02:30+01:00",
        "2026-10-25T03:00+01:00",
        "2026-10-25T03:30+01:00",
    ]


def test_lord_howe_moves_its_clocks_by_half_an_hour() -> None:
    assert after("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T00:00", 2) == [
        "2026-10-04T02:30+11:00",  # from 02:00 to 02:30
        "2026-10-05T02:15+11:00",
    ]
    assert after("0 * * * *", "Australia/Lord_Howe", "2026-10-03T14:00", 3) == [
        "2026-10-04T01:00+10:30",
        "2026-10-04T03:00+11:00",
        "2026-10-04T04:00+11:00",
    ]


def test_a_skipped_day_loses_no_tick() -> None:
    """Samoa skipped 30 December 2011. A tick due on that day comes right after it."""
    assert after("30 2 * * *", "Pacific/Apia", "2011-12-29T13:00", 3) == [
        "2011-12-31T00:00+14:00",
        "2011-12-31T02:30+14:00",
        "2012-01-01T02:30+14:00",
    ]


def test_a_range_of_one_number_is_that_number() -> None:
    """A range such as 5-5 means 5, with any step."""
    assert after("7-7/2 * * * *", "UTC", "2026-01-01T00:00", 2) == ["2026-01-01T00:07+00:00", "2026-01-01T01:07+00:00"]


def test_ticks_are_strictly_later_than_the_moment_asked_about() -> None:
    expression = Expression.parse("@hourly", "UTC")
    noon = at("2026-01-01T12:00")
    assert [next(expression.after(t)) - noon for t in (noon - 0.5, noon, noon + 0.5)] == [0, 3600, 3600]


def test_the_tick_before_is_strictly_earlier() -> None:
    noon = at("2026-06-01T12:00")
    assert Expression.parse("0 12 * * *", "UTC").before(noon) == noon - 86_400
    assert Expression.parse("0 12 * * *", "UTC").before(noon + 1) == noon
    assert Expression.parse("0 0 29 2 *", "UTC").before(noon) == at("2024-02-29T00:00")


def test_ticks_end_with_the_year_9999() -> None:
    assert list(Expression.parse("0 0 * * *", "UTC").after(at("9999-12-30T00:00"))) == [at("9999-12-31T00:00")]


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("15 2 * * *", "at 02:15 every day, Europe/Berlin"),
        ("@daily", "at 00:00 every day, Europe/Berlin"),
        ("*/5 * * * *", "every fifth minute of every hour, Europe/Berlin"),
        ("0 6 * * MON-FRI", "at 06:00 on Monday through Friday, Europe/Berlin"),
        ("0 0 1 * MON", "at 00:00 on the first day of month or on Monday, Europe/Berlin"),
        ("0 0 */2 * MON", "at 00:00 on every second day of month if it's on Monday, Europe/Berlin"),
        ("0 0 11,22,23,31 * *", "at 00:00 on the 11th, the 22nd, the 23rd, and the 31st day of month, Europe/Berlin"),
        ("0 7 * * FRI#2", "at 07:00 on the second Friday of the month, Europe/Berlin"),
        ("0 7 L * *", "at 07:00 on the last day of every month, Europe/Berlin"),
    ],
)
def test_words(expression: str, words: str) -> None:
    assert Expression.parse(expression, "Europe/Berlin").words() == words


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "found an empty text; expected five fields (minute, hour, day of month, month, day of week), or"),
        ("15 2 * *", "found 4 fields in '15 2 * *'; expected five fields"),
        ("0 15 2 * * *", "found 6 fields, and there is none for seconds in '0 15 2 * * *'; expected five fields"),
        ("@reboot", "found '@reboot'; expected five fields"),
        ("@yearly", "found '@yearly'; expected '0 0 1 1 *'"),
        ("@midnight", "found '@midnight'; expected @daily"),
        ("60 2 * * *", "minute: found 60 in '60'; expected 0-59"),
        ("0 24 * * *", "hour: found 24 in '24'; expected 0-23"),
        ("0 0 0 * *", "day of month: found 0 in '0'; expected 1-31"),
        ("0 0 1 13 *", "month: found 13 in '13'; expected 1-12 or JAN-DEC"),
        ("0 0 * * 8", "day of week: found 8 in '8'; expected 0-7 or SUN-SAT"),
        ("0 0 * * MO", "day of week: found 'MO'; expected *, 0-7 or SUN-SAT, a list, a range or a step"),
        ("0 -1 * * *", "hour: found '-1'; expected *, 0-23, a list, a range or a step"),
        ("0 17-9 * * *", "hour: found '17-9', a range that runs backwards; expected two ranges, such as 17-23,0-9"),
        ("0 0 * * FRI-MON", "day of week: found 'FRI-MON', a range that runs backwards; expected two ranges"),
        ("*/0 * * * *", "minute: found the step 0 in '*/0'; expected a step from 1 to 59"),
        ("*/90 * * * *", "minute: found the step 90 in '*/90'; expected a step from 1 to 59"),
        ("5/15 * * * *", "minute: found '5/15'; expected a range before the step, such as 5-59/15"),
        ("*,5 * * * *", "minute: found '*,5'; expected * alone, or a list without it"),
        ("1,,2 * * * *", "minute: found '1,,2'; expected *, 0-59, a list, a range or a step"),
        ("? * * * *", "minute: found '?'; expected *, 0-59, a list, a range or a step"),
        ("٣ * * * *", "minute: found '٣'; expected *, 0-59, a list, a range or a step"),
        ("0 0 * * 5#6", "day of week: found '5#6'; expected # with a number from 1 to 5, such as 5#2"),
        ("0 0 L/2 * *", "day of month: found 'L/2'; expected *, 1-31, a list, a range or a step"),
        ("0 0 31 2 *", "'0 0 31 2 *' is never due: there is no such date; expected a date that exists"),
        ("0 0 31 4,6 *", "'0 0 31 4,6 *' is never due: there is no such date; expected a date that exists"),
        ("* " * 300, "found '* * * * * * * * * * * * * * * * * * * * '; expected at most 200 printable characters"),
        ("0\t0 * * *", "found '0\\t0 * * *'; expected at most 200 printable characters"),
    ],
)
def test_bad_expressions(expression: str, message: str) -> None:
    with pytest.raises(BadExpression) as caught:
        Expression.parse(expression, "UTC")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("zone", "message"),
    [
        ("europe/berlin", "found 'europe/berlin'; expected Europe/Berlin"),
        ("Europe/Berln", "found 'Europe/Berln'; expected Europe/Berlin"),
        ("UTC+2", "found 'UTC+2'; expected an IANA name such as Europe/Berlin, or UTC"),
        ("../etc/passwd", "found '../etc/passwd'; expected an IANA name such as Europe/Berlin, or UTC"),
        ("", "found ''; expected an IANA name such as Europe/Berlin, or UTC"),
    ],
)
def test_bad_zones(zone: str, message: str) -> None:
    with pytest.raises(BadZone) as caught:
        Expression.parse("@daily", zone)
    assert str(caught.value) == message


def test_templates_show_the_clocks_of_the_zone() -> None:
    tick, previous = at("2026-10-25T00:30"), at("2026-10-24T00:30")
    text = "in/{{ previous_tick:%Y-%m-%d }}..{{tick:%d}}/100%/{{ tick:%H:%M %z }}"
    assert [found.name for found in placeholders(text)] == ["previous_tick", "tick", "tick"]
    filled = render(text, tick=tick, previous=previous, zone="Europe/Berlin")
    assert filled == "in/2026-10-24..25/100%/02:30 +0200"
    assert render("{{ tick:%H:%M %z }}", tick=tick + 3600, previous=None, zone="Europe/Berlin") == "02:30 +0100"
    assert render("{{ tick:%G-W%V, %% }}", tick=tick, previous=None, zone="UTC") == "2026-W43, %"
    assert render("no template, { or }", tick=tick, previous=None, zone="UTC") == "no template, { or }"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ tick }}", "found '{{ tick }}', which has no format; expected {{ tick:%Y-%m-%d }} or"),
        ("{{ now:%Y }}", "found '{{ now:%Y }}'; expected {{ tick:%Y-%m-%d }} or {{ previous_tick:%Y-%m-%d }}"),
        ("{{ tick:%Q }}", "found '%Q' in '{{ tick:%Q }}'; expected one of %Y %y %m %d %H %M %S %j %G %V %u %z %%"),
        ("{{ tick:%b }}", "found '%b' in '{{ tick:%b }}'; expected one of"),
        ("{{ tick:%Y% }}", "found '%' in '{{ tick:%Y% }}'; expected one of"),
        ("{{ tick:daily }}", "found '{{ tick:daily }}'; expected"),
        ("{{ tick:%Y/../%m }}", "found '{{ tick:%Y/../%m }}'; expected"),
        ("{{ tick:%Y", "found {{ without its pair; expected"),
        ("tick:%Y }}", "found }} without its pair; expected"),
        ("{{ tick:%Y | upper }}x{{ a.b }}", "found '{{ a.b }}'; expected"),
        ("{{}}", "found '{{}}'; expected"),
    ],
)
def test_bad_templates(text: str, message: str) -> None:
    with pytest.raises(BadTemplate) as caught:
        placeholders(text)
    assert str(caught.value).startswith(message)


def test_a_first_tick_has_none_before() -> None:
    with pytest.raises(BadTemplate, match="there is no tick before"):
        render("{{ previous_tick:%Y }}", tick=0, previous=None, zone="UTC")


def test_moments() -> None:
    assert parse_moment("2027-01-31", "Europe/Berlin") == at("2027-01-30T23:00")
    assert parse_moment("2027-01-31T18:00", "Europe/Berlin") == at("2027-01-31T17:00")
    assert parse_moment("2027-01-31 18:00:30-05:00", "Europe/Berlin") == at("2027-01-31T23:00:30")
    assert parse_moment("2026-03-29T02:30", "Europe/Berlin") == at("2026-03-29T01:00")  # skipped
    assert parse_moment("2026-10-25", "Europe/Berlin", last=True) == at("2026-10-25T22:59:59")
    assert parse_moment("2026-10-25T02:00", "Europe/Berlin", last=True) == at("2026-10-25T00:00")


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "2027-02-31", "31.01.2027", "2027-01-31T25:00", "2027-01-31T18", "1e9"]
)
def test_bad_moments(text: str) -> None:
    with pytest.raises(BadMoment, match="expected a date such as 2027-01-31"):
        parse_moment(text, "UTC")


TERMS = ["*", "0", "5", "31", "*/2", "1-5", "L", "LW", "5L", "1#2", "MON", "FEB", "7-7/3", "-", "/"]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("0123456789*/-,# LWMONSUJAFEB@{}%:tickYmd_T+Z", max_size=30),
    st.lists(st.sampled_from(TERMS), min_size=5, max_size=5).map(" ".join),
)


@settings(deadline=None)
@given(TEXTS)
def test_any_text_is_read_or_refused(text: str) -> None:
    """Any text is accepted or raises BadTick, never another error. An accepted expression has a next tick."""
    now = at("2026-11-22T12:00")
    with suppress(BadTick):
        found = Expression.parse(text, "America/New_York")
        assert next(found.after(now)) > now
        assert found.words().endswith(", America/New_York")
    with suppress(BadTick):
        Expression.parse("@daily", text)
    with suppress(BadTick):
        parse_moment(text, "UTC", last=True)
    with suppress(BadTick):
        render(text, tick=now, previous=now, zone="UTC")


def test_jitter_depends_on_name_and_tick_alone() -> None:
    drawn = [jitter_s("nightly", tick, 600) for tick in range(0, 60_000, 60)]
    assert drawn == [jitter_s("nightly", tick, 600) for tick in range(0, 60_000, 60)]
    assert all(0 <= seconds < 600 for seconds in drawn)
    assert 250 < sum(drawn) / len(drawn) < 350
    assert jitter_s("nightly", 0, 600) != jitter_s("other", 0, 600)
    assert jitter_s("nightly", 86_400, 0) == 0
    assert round(jitter_s("nightly", 86_400, 600), 3) == 444.164  # as on every other machine
