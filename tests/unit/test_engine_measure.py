"""How long a figure may take."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from nimble_jobs.engine import measure
from nimble_jobs.errors import UsageError
from tests import prefork
from tests.clocks import Clock

CPU = torch.device("cpu")


@pytest.mark.parametrize(("text", "seconds"), [(None, 0.5), ("", 0.5), ("0.02", 0.02), ("2", 2.0)])
def test_the_budget_is_what_the_environment_says(text: str | None, seconds: float) -> None:
    """Half a second, unless the environment asks for another time."""
    assert measure.budget_s(text) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "1s"])
def test_a_budget_that_is_no_time_is_bad_usage(text: str) -> None:
    """The message names the variable, what was found and what was expected."""
    with pytest.raises(UsageError) as caught:
        measure.budget_s(text)
    assert str(caught.value) == (
        f"NIMBLE_JOBS_TIMING_BUDGET_S: found {text!r}; expected a number of seconds above 0, such as 0.5"
    )


def test_processes_of_tests_time_briefly_too() -> None:
    """A process that a test starts inherits the tests' budget, which is that of this process."""
    code = "from nimble_jobs.engine import measure; print(measure.BUDGET_S)"
    done = prefork.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == measure.BUDGET_S == float(os.environ[measure.VARIABLE])


@pytest.mark.parametrize(("budget_s", "least", "most"), [(1e-6, 3, 3), (0.2, 10, 100)])
def test_a_figure_takes_no_more_calls_than_its_budget_allows(
    budget_s: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls warm up; then as many as the time allows, at least one. The figure is that of one call."""
    calls, clock = 0, Clock()
    monkeypatch.setattr(measure, "time", clock)

    def call() -> None:
        nonlocal calls
        calls += 1
        clock.sleep(0.002)

    assert measure.time_us(call, CPU, budget_s=budget_s) >= 2000
    assert least <= calls <= most


@pytest.mark.parametrize(
    ("launches_us", "spins_us", "kernels_us"),
    [
        ([50, 50, 50], [200, 200, 200], 40.0),
        ([300, 50, 50, 350], [200, 400, 400, 400], 40.0),  # once other threads delayed the launches for too long
        ([300, 900], [200, 400], 140.0),  # it never ran ahead: a model that waits for the device, or a full queue
    ],
)
def test_kernels_are_launched_while_the_device_is_busy(
    launches_us: list[float], spins_us: list[float], kernels_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches that took longer than the device was busy are no sample while there are others."""
    clock = {"host": 0.0, "device": 0.0}
    left, spins = list(launches_us), []

    class Event:
        def __init__(self, **_: Any) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock["device"]

        def query(self) -> bool:
            return clock["host"] > self.at

        def synchronize(self) -> None:
            clock["host"] = max(clock["host"], self.at)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    def keep_busy(micros: float, _: torch.device) -> None:
        spins.append(micros)
        clock["device"] = clock["host"] + micros

    def call() -> None:
        clock["host"] += left.pop(0)
        clock["device"] = max(clock["host"], clock["device"]) + 40.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "keep_busy", keep_busy)
    monkeypatch.setattr(measure, "synchronize", lambda _: None)
    assert measure.kernels_us(call, 100.0, CPU) == pytest.approx(kernels_us)
    assert (spins, left) == (spins_us, [])
