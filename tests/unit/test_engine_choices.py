"""Kinds of tasks are measured once, and what did not work is measured anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nimble_jobs.engine.measure import crowded
from nimble_jobs.kernels.choices import Choices, current, fastest_of, parts_here, using
from nimble_jobs.task_times import TaskChoice, TaskTimes

PARTS = {"task": "convolution", "x": "(1, 8, 6, 6)"}
WAYS = ("library", "product")
TIMES = TaskTimes(task="convolution 1x1", times_us=(("library", 5.0), ("product", 3.0)), chosen="product")
EARLIER = TaskTimes(
    task="convolution 1x1",
    times_us=(("library", 2.0), ("product", 3.0)),
    chosen="library",
    measured_for="zoo:first",
    measured_at=1.0,
)


def never() -> TaskTimes:
    pytest.fail("measured")


def counted(calls: list[str]) -> Callable[[], TaskTimes]:
    def measure() -> TaskTimes:
        calls.append("measured")
        return TIMES

    return measure


def test_a_kind_of_task_is_measured_once_in_a_build() -> None:
    """Other parts, or other ways to run it, make another kind."""
    choices, calls = Choices(), list[str]()
    for _ in range(3):
        assert choices.choose(PARTS, WAYS, counted(calls)) == "product"
    assert len(calls) == 1
    choices.choose(PARTS | {"x": "(2, 8, 6, 6)"}, WAYS, counted(calls))
    choices.choose(PARTS, (*WAYS, "fused"), counted(calls))
    assert len(calls) == 3
    assert choices.made()[0] == TaskChoice(times=TIMES, tasks=3)
    choices.begin()
    assert choices.made() == ()


def test_a_choice_for_a_crowd_is_another_one() -> None:
    """Its key and its words say how many copies were timed at once; those of a task by itself say nothing."""
    choices, calls = Choices(), list[str]()
    choices.choose(PARTS, WAYS, counted(calls))
    with crowded(4):
        for _ in range(2):
            choices.choose(PARTS, WAYS, counted(calls))
        with crowded(1):
            choices.choose(PARTS, WAYS, counted(calls))
    choices.choose(PARTS, WAYS, counted(calls))
    assert len(calls) == 2
    assert [parts.get("at once") for parts, _ in choices.measured.values()] == [None, "4"]
    assert [made.times.task for made in choices.made()] == ["convolution 1x1", "convolution 1x1, 4 at once"]


def test_what_an_earlier_build_measured_is_not_measured_again() -> None:
    """The choice says whose it is, and the build says which it went by."""
    first = Choices()
    first.choose(PARTS, WAYS, lambda: TIMES)
    ((key, (parts, _)),) = first.measured.items()
    assert parts == PARTS | {"ways": "library, product"}
    second = Choices({key: EARLIER})
    assert second.choose(PARTS, WAYS, never) == "library"
    assert second.made() == (TaskChoice(times=EARLIER, tasks=1),)
    assert (second.measured, second.used) == ({}, {key})


def test_a_way_that_does_not_exist_is_not_taken() -> None:
    """Whatever a row says, only the ways at hand are run."""
    first = Choices()
    first.choose(PARTS, WAYS, lambda: TIMES)
    strange = TaskTimes(task="t", times_us=(("magic", 1.0),), chosen="magic")
    second = Choices(dict.fromkeys(first.measured, strange))
    assert second.choose(PARTS, WAYS, lambda: TIMES) == "product"
    assert (len(second.measured), second.used) == (1, set())


def test_what_did_not_work_is_forgotten() -> None:
    """Earlier choices are named, so that they go; new ones are not kept; those before `begin` are not in doubt."""
    first = Choices()
    first.choose(PARTS, WAYS, lambda: TIMES)
    (key,) = first.measured
    choices = Choices({key: EARLIER})
    choices.choose(PARTS | {"x": "before"}, WAYS, lambda: TIMES)
    choices.begin()
    choices.choose(PARTS, WAYS, never)
    choices.choose(PARTS | {"x": "new"}, WAYS, lambda: TIMES)
    choices.doubt()
    assert (choices.doubted, choices.used) == ({key}, set())
    assert [parts["x"] for parts, _ in choices.measured.values()] == ["before"]
    assert choices.choose(PARTS, WAYS, lambda: TIMES) == "product", "measured anew"


def test_the_choices_of_a_build_are_its_own() -> None:
    """Outside of the block, those of the process hold again, also after an error."""
    mine = Choices()
    before = current()
    with using(mine):
        assert current() is mine
        with pytest.raises(KeyError), using(Choices()):
            {}.pop("inside")
        assert current() is mine
    assert current() is before


def test_the_device_and_its_software_are_part_of_the_key() -> None:
    """By the names that keys of schedules have, so that both become stale together."""
    parts = parts_here(torch.device("cpu"))
    assert {"device", "device.name", "torch", "format"} <= {*parts}


@pytest.mark.parametrize(
    ("times", "gain", "chosen"),
    [
        ({"library": 10.0, "a": 9.4, "b": 9.6}, 0.95, "a"),
        ({"library": 10.0, "a": 9.6}, 0.95, "library"),
        ({"library": 10.0, "a": 10.6, "b": 10.4}, 1.05, "b"),  # what replaces a slow first call may take longer
        ({"library": 10.0, "a": 10.6}, 1.05, "library"),
        ({"library": 10.0}, 1.05, "library"),
    ],
)
def test_the_fastest_way_must_be_worth_it(times: dict[str, float], gain: float, chosen: str) -> None:
    assert fastest_of("a product", times, gain).chosen == chosen
