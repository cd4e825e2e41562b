"""The one way to a schedule: what is loaded, built, kept, refused and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from nimble_jobs.errors import JobFailed, ModelChanged
from nimble_jobs.job import Hit
from nimble_jobs.kernels import choices
from nimble_jobs.planner.lookup import obtain as obtaining
from nimble_jobs.planner.lookup.obtain import BuildResult, by_spec, obtain
from nimble_jobs.planner.lookup.stored import Later, Miss, Refused, Taken, compiles_again
from nimble_jobs.planner.sources.source import Kernels
from nimble_jobs.schedule import COMPILERS
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.task_times import TaskChoice, TaskTimes
from tests.store_samples import a_schedule

KEY = "ab" * 32
MISS = Miss(reason="nothing is stored")
STORABLE: Any = SimpleNamespace(parts={"model.source": "zoo:first"})
Load = Callable[[], Taken[str] | Miss | Refused]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as found:
        yield found


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is stored, in place of storing it."""
    found: list[Any] = []
    monkeypatch.setattr(obtaining, "keep", lambda storables, _: found.extend(storables))
    return found


def loads(*answers: Taken[str] | Miss | Refused) -> Load:
    """Give these answers in turn."""
    left = iter(answers)
    return lambda: next(left)


def never() -> BuildResult[str]:
    pytest.fail("built")


def built(closed: list[str], **named: Any) -> Callable[[], BuildResult[str]]:
    return lambda: BuildResult(value="new", storables=(STORABLE,), close=lambda: closed.append("closed"), **named)


def test_what_is_stored_is_taken(store: Store, kept: list[Any]) -> None:
    """Nothing is built, kept or counted."""
    found = obtain(KEY, loads(Taken(value="old")), never, store=store)
    assert (found.hit, found.value, found.miss_reason, found.fallback) == (Hit.STORED, "old", None, None)
    assert (kept, store.schedules.uses().misses) == ([], {})


def test_a_miss_is_built_kept_and_counted(store: Store, kept: list[Any]) -> None:
    """The answer has the new value, and the reason of the miss."""
    closed: list[str] = []
    found = obtain(KEY, loads(MISS, MISS), built(closed), store=store)
    assert (found.hit, found.value, found.miss_reason, found.fallback) == (Hit.MISS, "new", MISS.reason, None)
    assert (kept, closed) == ([STORABLE], [])
    assert store.schedules.uses().misses == {MISS.reason: 1}


def test_what_another_process_stored_meanwhile_is_taken(store: Store, kept: list[Any]) -> None:
    """The second look, once it is our turn, finds it: a hit."""
    found = obtain(KEY, loads(MISS, Taken(value="theirs")), never, store=store)
    assert (found.hit, found.value, found.miss_reason) == (Hit.STORED, "theirs", None)


@pytest.mark.parametrize("looks", [1, 2])
def test_what_is_refused_is_not_built(store: Store, kept: list[Any], looks: int) -> None:
    """At the first look, and if another process has found out meanwhile."""
    refused = Refused(reason="quarantined", fallback="it differs from eager")
    found = obtain(KEY, loads(*[MISS] * (looks - 1), refused), never, store=store)
    assert (found.hit, found.value, found.fallback) == (Hit.MISS, None, "it differs from eager")


@pytest.mark.parametrize("answer", [Refused(reason=MISS.reason, fallback="not wanted"), Later(reason=MISS.reason)])
def test_the_caller_may_do_without(store: Store, kept: list[Any], answer: Refused | Later) -> None:
    """For good or for now; the miss counts."""
    found = obtain(KEY, loads(MISS), never, store=store, on_miss=lambda _: answer)
    assert (found.hit, found.value, found.miss_reason) == (Hit.MISS, None, MISS.reason)
    assert found.fallback == ("not wanted" if isinstance(answer, Refused) else None)
    assert store.schedules.uses().misses == {MISS.reason: 1}


def test_a_spec_may_want_eager_or_an_error(store: Store) -> None:
    """Both answers name the field and the schedule that is missing."""
    said = "there is no stored schedule: for validations, nothing is stored"
    with pytest.raises(JobFailed, match=rf"schedule\.on_miss is fail, and {said}"):
        by_spec("fail", "for validations, ")(MISS)
    answer = by_spec("eager", "for validations, ")(MISS)
    assert answer == Refused(reason=MISS.reason, fallback=f"schedule.on_miss is eager, and {said}")
    assert by_spec("build")(MISS) is MISS


def test_a_build_that_disagrees_is_kept_as_refused_and_closed(store: Store, kept: list[Any]) -> None:
    """Nobody builds it again, and nobody runs it."""
    closed: list[str] = []
    found = obtain(KEY, loads(MISS, MISS), built(closed, failure="it differs"), store=store)
    assert (found.value, found.fallback) == (None, "it differs")
    assert (kept, closed) == ([STORABLE], ["closed"])


def test_code_that_changed_meanwhile_is_not_kept(store: Store, kept: list[Any]) -> None:
    """What was built gives its memory back."""
    closed: list[str] = []

    def changed() -> None:
        raise ModelChanged("net.py")

    with pytest.raises(ModelChanged):
        obtain(KEY, loads(MISS, MISS), built(closed), store=store, check_code=changed)
    assert (kept, closed) == ([], ["closed"])


def test_what_serves_others_stays_stored(store: Store, kept: list[Any]) -> None:
    """The new value is used, and the stored one is not replaced."""
    sparing = Miss(reason="another source", spares=True)
    assert obtain(KEY, loads(sparing, sparing), built([]), store=store).value == "new"
    assert kept == []


def test_only_the_kernels_of_compilers_are_compiled_again() -> None:
    """Those of eager and of libraries are operators, which the program names."""
    known = {*get_args(Kernels), "a library"}
    assert known > COMPILERS
    again = {kernels for kernels in known if compiles_again(a_schedule(KEY, kernels=kernels))}
    assert again == COMPILERS


def test_what_one_build_measured_the_next_one_takes(store: Store, kept: list[Any]) -> None:
    """Also for another schedule, which says for which model it was measured."""
    measured: list[str] = []

    def measure() -> TaskTimes:
        measured.append("once")
        return TaskTimes(task="a product", times_us=(("library", 2.0), ("ours", 1.0)), chosen="ours")

    def build() -> BuildResult[tuple[TaskChoice, ...]]:
        assert choices.current().choose({"task": "product"}, ("library", "ours"), measure) == "ours"
        return BuildResult(value=choices.current().made(), storables=(STORABLE,), close=lambda: None)

    first, second = (obtain(key * 64, lambda: MISS, build, store=store).value for key in "ab")
    assert first is not None
    assert second is not None
    assert len(measured) == 1
    assert (first[0].times.measured_for, second[0].times.measured_for) == (None, "zoo:first")


def test_what_a_build_doubts_is_measured_again(store: Store, kept: list[Any]) -> None:
    """A row that made a candidate fail does not stay."""

    def build() -> Refused:
        times = TaskTimes(task="a product", times_us=(("library", 2.0), ("ours", 1.0)), chosen="ours")
        choices.current().choose({"task": "product"}, ("library", "ours"), lambda: times)
        if store.task_times.count():
            choices.current().doubt()
        return Refused(reason="r", fallback="f")

    for rows in (1, 0, 1):
        obtain(KEY, lambda: MISS, build, store=store)
        assert store.task_times.count() == rows
