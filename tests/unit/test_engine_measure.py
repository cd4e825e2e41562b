"""How long a figure may take."""

from __future__ import annotations

import os
import sys

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
