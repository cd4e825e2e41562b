"""The account of a `run`: each phase is a function that there is, and the phases of a thread add up to its time."""

from __future__ import annotations

import importlib
import time
from functools import reduce
from types import ModuleType

import pytest

from tests.scripts import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("run_phases")


def test_every_phase_is_a_function_of_the_package(script: ModuleType) -> None:
    """A renamed one would otherwise be found out on the machine that is to be measured."""
    for place in script.WATCHED:
        module, _, path = place.partition(":")
        assert callable(reduce(getattr, path.split("."), importlib.import_module(module))), place


def test_phases_of_a_thread_add_up(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase does not count those inside, also where one raises; it spans from its first beginning to its last end."""
    now = iter(range(100))
    monkeypatch.setattr(script, "BEGAN_CLOCK", 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    clock = script.Clock()

    def fail() -> None:
        raise KeyError

    def outer() -> None:
        clock.timed(lambda: None, "inner")()
        with pytest.raises(KeyError):
            clock.timed(fail, "inner")()

    clock.timed(outer, "outer")()
    (phases,) = clock.threads.values()
    assert {name: (p.first_s, p.last_s, p.wall_s) for name, p in phases.items()} == {
        "outer": (0.0, 5.0, 3.0),
        "inner": (1.0, 4.0, 2.0),
    }
