"""The `cron` part of specs that are right: what it holds, and what the simulated year lets pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs import client, spec
from nimble_jobs.errors import UsageError
from nimble_jobs.ticks import YEAR_S, Expression, clash, closest_s
from tests.bad_specs import SCORE
from tests.bad_timers import NIGHTLY, NOW, timer

FULL = """\
expression: "15 2 * * MON-FRI"
timezone: Europe/Berlin
overlap: queue
catch_up: all
grace: 2h
jitter: 10m
start: 2026-12-01
end: 2027-12-01T18:00+01:00
keep: 7
"""


def loads(text: str) -> spec.JobSpec:
    return spec.loads(text, "job.yaml", Path("/nowhere"), check_files=False, now=NOW)


def test_all_fields_and_their_defaults() -> None:
    """A stored spec comes back as it was, with its templates in place."""
    full = loads(timer(FULL))
    assert full.cron is not None
    assert full.cron.model_dump(mode="json") == {
        "expression": "15 2 * * MON-FRI",
        "timezone": "Europe/Berlin",
        "overlap": "queue",
        "catch_up": "all",
        "grace": 7200.0,
        "jitter": 600.0,
        "start": "2026-12-01",
        "end": "2027-12-01T18:00+01:00",
        "keep": 7,
    }
    assert str(full.output.path) == "/out/digits-{{ tick:%Y-%m-%d }}"
    assert spec.restore(spec.dump(full)) == full
    plain = loads(timer(NIGHTLY)).cron
    assert plain is not None
    assert (plain.timezone, plain.overlap, plain.catch_up, plain.grace, plain.jitter) == (
        "UTC",
        "skip",
        "latest",
        None,
        0,
    )
    assert (plain.start, plain.end, plain.keep) == (None, None, 30)


def test_a_fixed_path_is_fine_where_it_is_replaced() -> None:
    text = timer(NIGHTLY, path="out").replace('"out"', "out\n  if_exists: replace")
    assert loads(text).cron is not None


def test_templates_may_stand_in_the_input_and_the_key() -> None:
    text = SCORE.replace("digits.npz", "'in/{{ previous_tick:%Y-%m-%d }}/*.npz'").replace(
        "device: auto", "key: 'a-{{ tick:%j-%Y }}'"
    )
    loaded = loads(timer(NIGHTLY, spec=text))
    assert loaded.input.source == "/nowhere/in/{{ previous_tick:%Y-%m-%d }}/*.npz"
    assert loaded.run.key == "a-{{ tick:%j-%Y }}"


def test_the_offset_tells_the_two_passes_of_an_hour_apart() -> None:
    every = 'expression: "*/30 * * * *"\ntimezone: Europe/Berlin'
    assert loads(timer(every, path="{{ tick:%Y%m%dT%H%M%z }}")).cron is not None
    once_a_day = 'expression: "30 2 * * *"\ntimezone: Europe/Berlin'
    assert loads(timer(once_a_day, path="{{ tick:%Y%m%dT%H%M }}")).cron is not None


def test_a_timer_of_every_minute_is_looked_at_around_the_hour_that_comes_twice() -> None:
    """The repeated hour lies far behind the ticks that are looked at one by one."""
    every = Expression.parse("* * * * *", "Europe/Berlin")
    found = clash("{{ tick:%Y%m%dT%H%M }}", every, NOW, NOW + YEAR_S)
    assert found is not None
    assert (found.text, found.second - found.first) == ("20271031T0200", 3600)
    assert clash("{{ tick:%Y%m%dT%H%M%z }}", every, NOW, NOW + YEAR_S) is None
    assert clash("{{ previous_tick:%Y%m%dT%H%M }}", every, NOW, NOW + YEAR_S) is not None
    assert closest_s(every, NOW, NOW + YEAR_S) == 60


def test_a_spec_with_cron_is_not_submitted_from_python(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nimble_jobs\.cron\.add"):
        client.submit(loads(timer(NIGHTLY)), home=tmp_path)
    assert not list(tmp_path.iterdir())
