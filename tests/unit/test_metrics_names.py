"""Names of users in labels: any text is escaped, and only so many of them have a label."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from nimble_jobs.metrics.labels import NAMES, bounded, label
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.tables import GroupRow
from nimble_jobs.store.timer_tables import TimerRow
from nimble_jobs.store.words import words
from tests.metrics import scraped, value
from tests.store_samples import NOW, folder_in_memory, submit

HOSTILE = [
    'quo"te',
    "back\\slash",
    "line\nfeed",
    "carriage\rreturn",
    "\u202eright to left",
    "lone \udc80 surrogate",
    "nul \0 and \x1b[31m",
    'end"} 1\nnimble_jobs_jobs{state="queued"} 7',
    "line \u2028 separator",
    "{}#,= ",
    "",
]


def timer(name: str, **values: float | str | None) -> TimerRow:
    known: dict[str, object] = {"state": "active", "next_at": NOW + 60, "last_success_at": NOW - 60} | values
    return TimerRow(
        name=name,
        since=NOW,
        next_due=None,
        moved_at=NOW,
        created_at=NOW,
        edited_at=NOW,
        file="f",
        base="/",
        allow_python="[]",
        digest="",
        spec="{}",
        **known,
    )


def insert(store: Store, *rows: TimerRow | GroupRow) -> None:
    def work(session: Session) -> None:
        session.add_all(rows)

    store._database.write(work)


def labelled(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str) -> dict[str, float]:
    """The samples of a family with one label, by its value."""
    return {labels[0][1]: v for (family, labels), v in samples.items() if family == f"nimble_jobs_{name}"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(resolve(str(tmp_path / "home")))


def test_hostile_names(store: Store) -> None:
    """Parsers of both formats give back each name, and no sample that a name made up."""
    insert(store, *map(timer, HOSTILE))
    insert(store, *(GroupRow(name=words(name), most=n + 1) for n, name in enumerate(HOSTILE)))
    samples = scraped(store, NOW)
    for family in ("timer_lateness_seconds", "timer_last_success_timestamp_seconds", "group_limit"):
        found = labelled(samples, family)
        assert len(found) == len(HOSTILE)
        assert {'quo"te', "back\\slash", "line\\x0afeed", "\u202eright to left", "{}#,= "} <= found.keys()
    assert value(samples, "jobs", state="queued", kind="score") == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), unique=True, max_size=8))
def test_any_name(names: list[str]) -> None:
    """Whatever a database holds, both parsers read the exposition and find one sample for each name."""
    with folder_in_memory() as folder, open_store(resolve(f"{folder}/home")) as store:
        stored = {label(name) for name in names}
        insert(store, *(timer(name) for name in stored))
        assert len(labelled(scraped(store, NOW), "timer_lateness_seconds")) == len(stored)


@given(st.text())
def test_labels_are_one_line_of_text(text: str) -> None:
    """Without control characters and lone surrogates, and the same again if done twice."""
    found = label(text)
    assert found.encode().decode() == found
    assert len(found.splitlines()) <= 1
    assert label(found) == found


def test_ten_thousand_timers(store: Store) -> None:
    """The first ones by name have a label; `other` shows the worst of the rest, and of a timer that is called so."""
    insert(store, *(timer(f"t-{n:05}", last_success_at=NOW - n) for n in range(10_000)))
    insert(
        store,
        timer("other", last_success_at=None),
        timer("zz", next_at=NOW - 33),
        timer("zzz", last_success_at=NOW - 10**6),
    )
    insert(store, timer("zzzz", state="paused", next_at=NOW - 10**6))
    samples = scraped(store, NOW)
    late = labelled(samples, "timer_lateness_seconds")
    assert len(late) == NAMES + 1
    assert late["other"] == 33
    success = labelled(samples, "timer_last_success_timestamp_seconds")
    assert set(success) == set(late)
    assert success["other"] == NOW - 10**6
    assert success["t-00007"] == NOW - 7
    assert value(samples, "timers", state="active") == 10_003


def test_as_many_timers_as_labels(store: Store) -> None:
    """Each has its own, and there is no `other`."""
    insert(store, *(timer(f"t-{n:05}") for n in range(NAMES)))
    assert "other" not in labelled(scraped(store, NOW), "timer_lateness_seconds")


def test_groups(store: Store) -> None:
    """Running and queued jobs of each; the groups without a label of their own are added up."""
    for n in range(3):
        submit(store, spec={"name": "a", "run": {"group": {"name": "g", "limit": 2}}}, now=NOW + n)
    assert store.jobs.claim("w", device="cpu", now=NOW) is not None
    insert(store, *(GroupRow(name=f"h-{n:05}", most=1) for n in range(NAMES + 10)))
    samples = scraped(store, NOW)
    assert value(samples, "group_limit", group="g") == 2
    assert value(samples, "group_running", group="g") == 1
    assert value(samples, "group_queued", group="g") == 2
    assert labelled(samples, "group_limit")["other"] == 11


@given(
    st.dictionaries(st.text(string.ascii_lowercase, max_size=3), st.integers(0, 9), max_size=12),
    st.dictionaries(st.text(string.ascii_lowercase, max_size=3), st.integers(0, 9), max_size=12),
    st.integers(1, 6),
)
def test_bounded_counters_never_fall(first: dict[str, int], more: dict[str, int], most: int) -> None:
    """Names that come later may push others into `other`, which then grows; no value that stays gets smaller."""
    before = bounded(first.items(), most)
    grown = {name: first.get(name, 0) + more.get(name, 0) for name in first.keys() | more.keys()}
    after = bounded(grown.items(), most)
    assert len(after) <= most + 1
    assert sum(after.values()) == sum(grown.values())
    assert all(after[name] >= count for name, count in before.items() if name in after)
    assert "other" in after or "other" not in before
