"""Task times in the store: believed if sound, bounded, and removed like schedules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import update

from nimble_jobs.store import Store, open_store, prune, task_times
from nimble_jobs.store.home import resolve
from nimble_jobs.store.prune import Wish, look, remove
from nimble_jobs.store.task_times import TaskTimesRow
from nimble_jobs.store.toolchain import Toolchain
from nimble_jobs.task_times import Parts, TaskTimes, task_key
from tests.store_samples import NOW

TIMES = TaskTimes(task="convolution 1x1", times_us=(("library", 5.0), ("product", 3.25)), chosen="product")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def measured(*names: str, **parts: str) -> dict[str, tuple[Parts, TaskTimes]]:
    """Kinds of tasks of these names."""
    found = [{"task": name, **parts} for name in names]
    return {task_key(each): (each, TIMES) for each in found}


def stored(store: Store) -> set[str]:
    return {row.parts["task"] for row in store.task_times.rows()}


def test_what_is_saved_is_read_with_its_origin(store: Store) -> None:
    """For which model it was measured, and when."""
    store.task_times.save(measured("a"), NOW, model="zoo:first")
    (found,) = store.task_times.read().values()
    assert found.times_us == TIMES.times_us
    assert (found.chosen, found.measured_for, found.measured_at) == ("product", "zoo:first", NOW)
    assert (store.task_times.count(), store.task_times.damaged()) == (1, [])


@pytest.mark.parametrize("column", ["text", "parts", "key"])
def test_a_damaged_row_is_not_believed(store: Store, column: str) -> None:
    """`check` names it, and pruning what is quarantined removes it."""
    store.task_times.save(measured("a", "b"), NOW)
    (key, _), *_ = measured("a").items()
    changed = {"text": TaskTimesRow.text + " ", "parts": TaskTimesRow.parts + " ", "key": "x" * 64}[column]
    store.task_times._db.write(
        lambda session: session.execute(update(TaskTimesRow).where(TaskTimesRow.key == key).values({column: changed}))
    )
    assert {*store.task_times.read()} == {*measured("b")}
    assert [line.partition(":")[0] for line in store.check()] == [
        f"task times {('x' * 64 if column == 'key' else key)[:12]}"
    ]
    remove(store, look(store, Wish(quarantined=True), NOW))
    assert (store.task_times.count(), store.check()) == (1, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"chosen": "magic"},
        {"times_us": [["library", float("inf")]], "chosen": "library"},
        {"times_us": [["library", -1.0]], "chosen": "library"},
        {"task": "a\x1b[2J"},
        {"times_us": 3},
        {"more": 1},
    ],
)
def test_values_that_no_build_measured_are_refused(wrong: dict[str, object]) -> None:
    """They are printed, and decide what runs."""
    raw = {"task": "t", "times_us": [["library", 1.0]], "chosen": "library"}
    assert TaskTimes.from_plain(raw).chosen == "library"
    with pytest.raises(ValueError, match="t"):
        TaskTimes.from_plain(json.loads(json.dumps(raw | wrong)))


def test_doubted_rows_go(store: Store) -> None:
    """The next build measures that kind of task again."""
    store.task_times.save(measured("a", "b"), NOW)
    store.task_times.save({}, NOW, doubted=measured("a"))
    assert stored(store) == {"b"}


def test_the_longest_unused_go_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is bounded. What a build went by counts as used."""
    monkeypatch.setattr(task_times, "_MOST", 3)
    for age, name in enumerate("abc"):
        store.task_times.save(measured(name), NOW + age)
    store.task_times.save(measured("d"), NOW + 10, used=measured("a"))
    assert stored(store) == {"a", "c", "d"}


def test_several_processes_save_the_same_kinds_at_once(store: Store) -> None:
    """Each through its own connection; nothing fails, and every kind has one row."""

    def save(names: str) -> None:
        with open_store(store.home) as mine:
            for name in names:
                mine.task_times.save(measured(name), NOW)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, ["abc", "cba", "bca", "acb"]))
    assert stored(store) == {*"abc"}
    assert store.task_times.damaged() == []


def test_pruning_goes_by_the_rules_of_schedules(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale is what this machine's devices measured with other software."""
    here = Toolchain(
        versions={"cuda": {"driver": "2"}}, devices={"cuda": frozenset({"GPU"})}, package=lambda _: "unknown"
    )
    monkeypatch.setattr(prune, "toolchain", lambda: here)
    gpu = {"device": "cuda", "device.name": "GPU"}
    store.task_times.save(measured("old driver", **gpu, driver="1"), NOW)
    store.task_times.save(measured("other machine", **gpu | {"device.name": "other"}, driver="1"), NOW)
    store.task_times.save(measured("current", **gpu, driver="2"), NOW + 100)
    remove(store, look(store, Wish(max_bytes=0), NOW + 100))
    assert store.task_times.count() == 3, "the size of schedules is no rule for them"
    remove(store, look(store, Wish(stale=True), NOW + 100))
    assert stored(store) == {"other machine", "current"}
    remove(store, look(store, Wish(unused_for_s=50), NOW + 100))
    assert stored(store) == {"current"}
