"""Which jobs go, when something daily is due, and how the size of a step follows its time. Nothing is stored here."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.job import JobState
from nimble_jobs.plural import count, plural
from nimble_jobs.retention import Rules, rules_of, slot_of
from nimble_jobs.retention.pace import TARGET_S, Pace
from nimble_jobs.retention.rules import DAY_S, Spared, goes
from nimble_jobs.settings import Settings, read_settings
from nimble_jobs.store.expiry import Ended

NOW = 1_800_000_000.0


def ended(age_days: float, state: JobState = JobState.SUCCEEDED, seq: int = 1) -> Ended:
    at = NOW - age_days * DAY_S
    return Ended(
        seq=seq, id=f"j{seq}", name="a", kind="score", state=state, attempt=1, finished_at=at, output=None, bytes=1
    )


def settings(tmp_path: Path, text: str = "") -> Settings:
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "config.yaml").chmod(0o600)
    return read_settings(tmp_path, environ={})


@pytest.mark.parametrize(
    ("state", "stays", "leaves"),
    [
        (JobState.SUCCEEDED, 29.9, 30),
        (JobState.CANCELLED, 29.9, 30),
        (JobState.FAILED, 89.9, 90),
        (JobState.QUARANTINED, 89.9, 90),
    ],
)
def test_ages(state: JobState, stays: float, leaves: float) -> None:
    """What failed is looked at later than what went well. An age counts from the end of a job."""
    assert not goes(ended(stays, state), Rules(), Spared(), NOW)
    assert goes(ended(leaves, state), Rules(), Spared(), NOW)
    assert not goes(ended(9999, state), Rules(keep_s=None, keep_failed_s=None), Spared(), NOW)
    assert goes(ended(0, state), Rules(keep_s=0, keep_failed_s=0), Spared(), NOW)


def test_a_job_that_is_needed_stays() -> None:
    """Whatever its age and its number."""
    needed = Spared(needed=frozenset({"j1"}), newest={"a": 100})
    assert not goes(ended(9999), Rules(keep_s=0, per_name=1), needed, NOW)


def test_a_number_for_each_name(tmp_path: Path) -> None:
    """Alone it decides alone; beside an age either keeps a job."""
    spared = Spared(newest={"a": 5})
    alone = rules_of(settings(tmp_path), per_name=2)
    both = rules_of(settings(tmp_path), per_name=2, keep_s=30 * DAY_S)
    assert [goes(ended(age, seq=seq), alone, spared, NOW) for seq, age in ((4, 1), (5, 9999))] == [True, False]
    assert [goes(ended(age, seq=seq), both, spared, NOW) for seq, age in ((4, 1), (4, 31), (5, 9999))] == [
        False,
        True,
        False,
    ]
    assert not goes(ended(9999), alone, Spared(), NOW), "a name with few jobs keeps all"


def test_the_jobs_of_a_timer() -> None:
    """Its newest stay, whatever their age; of the others those that failed, as long as any that failed."""
    spared = Spared(timed={"j1": True, "j2": False})
    assert not goes(ended(9999, seq=1), Rules(keep_s=0), spared, NOW)
    assert goes(ended(1, seq=2), Rules(), spared, NOW)
    assert not goes(ended(89, JobState.FAILED, seq=2), Rules(), spared, NOW)
    assert goes(ended(90, JobState.FAILED, seq=2), Rules(), spared, NOW)


def test_rules_of_the_configuration(tmp_path: Path) -> None:
    """They hold unless a command names some; what it leaves out is theirs."""
    assert rules_of(settings(tmp_path)) == Rules()
    ours = settings(tmp_path, "version: 1\nretention: {keep: 2d, per_name: 7, logs: 5d}\n")
    assert rules_of(ours) == Rules(keep_s=2 * DAY_S, per_name=7, logs_s=5 * DAY_S)
    assert rules_of(ours, keep_failed_s=DAY_S) == Rules(keep_s=2 * DAY_S, keep_failed_s=DAY_S, logs_s=5 * DAY_S)
    assert rules_of(settings(tmp_path, "version: 1\nretention: {per_name: 7}\n")) == Rules(per_name=7, by_age=False)
    assert rules_of(settings(tmp_path), keep_s=DAY_S).logs_s == DAY_S


@given(st.floats(0, 4e9), st.integers(0, 23), st.integers(0, 59))
def test_a_daily_slot(now: float, hours: int, minutes: int) -> None:
    """It is the last one up to now, less than a day ago, and at its time."""
    slot = slot_of(now, f"{hours:02}:{minutes:02}")
    assert now - DAY_S < slot <= now
    assert abs((slot - (hours * 3600 + minutes * 60) + DAY_S / 2) % DAY_S - DAY_S / 2) < 1e-3


def test_pace() -> None:
    """A quick step doubles the next at most; a slow one makes it smaller at once, but never none."""
    pace = Pace(first=50, least=10, most=500)
    pace.took(TARGET_S / 100)
    assert pace.size == 100
    pace.took(TARGET_S * 4)
    assert pace.size == 25
    pace.took(99.0)
    assert pace.size == 10
    for _ in range(20):
        pace.took(0.0)
    assert pace.size == 500


def test_nouns() -> None:
    """One is one; nothing is several."""
    assert [count(n, "job") for n in (0, 1, 2, 1000)] == ["0 jobs", "1 job", "2 jobs", "1,000 jobs"]
    assert [plural(n, "entry") for n in (1, 2)] == ["entry", "entries"]
