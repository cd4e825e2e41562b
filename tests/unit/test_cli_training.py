"""How a training looks to whoever watches it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nimble_jobs.cli import output
from nimble_jobs.cli.progress import Bars
from nimble_jobs.job import Event, Job, JobState
from nimble_jobs.views import jobs as job_view


@pytest.mark.parametrize(
    ("timings", "text", "steps"),
    [
        ({}, "", ""),
        ({"steps_per_s": 3.0}, "", "3.0 steps/s"),
        ({"loss": 0.08123, "steps_per_s": 312.4}, "loss 0.0812", "312 steps/s"),
        ({"loss": 1.5, "accuracy": 0.975, "steps_per_s": 4.66}, "loss 1.5, accuracy 97.5%", "4.7 steps/s"),
        ({"records_per_s": 12.0, "run_s": 3.0}, "", ""),
    ],
)
def test_a_training_under_way(timings: dict[str, float], text: str, steps: str) -> None:
    """Loss, accuracy where there is one, and steps a second, once they are known."""
    assert job_view.training(timings) == text
    assert job_view.steps_rate(timings) == steps


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_of_a_training_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps a second, loss and accuracy stand whole beside the bar, in one line."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(output, "error_console", lambda: console)
    bars = Bars()
    bars.update([running({"loss": 0.000947123, "accuracy": 1.0, "steps_per_s": 349.2})])
    bars.close()
    console.file = io.StringIO()
    console.print(bars._progress.get_renderable())
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("digits-train ")
    assert " 349 steps/s " in line
    assert line.rstrip().endswith("loss 0.000947, accuracy 100.0%")
    assert ("50500/156000" in line) == (width == 120)


def running(timings: dict[str, float]) -> Job:
    """A training under way."""
    return Job(
        id="2mzeje7d6g3j",
        name="digits-train",
        kind="finetune",
        state=JobState.RUNNING,
        priority=0,
        attempt=1,
        max_attempts=3,
        device="cpu",
        foreground=True,
        key=None,
        after=(),
        not_before=0.0,
        timeout_s=None,
        cancel_requested=False,
        worker="0-k0xqjvp6",
        created_at=0.0,
        started_at=1.0,
        finished_at=None,
        records_done=50500,
        records_total=156000,
        records_bad=0,
        phase="run",
        error=None,
        timings=timings,
    )


@pytest.mark.parametrize(("epochs", "lines"), [(9, 11), (10, 11), (3000, 11)])
def test_the_history_of_a_long_training(epochs: int, lines: int) -> None:
    """Of many events of one kind in a row the first and the last ones are shown, and how many are not."""
    kinds = ["schedule", *["epoch"] * epochs, "succeeded"]
    events = [
        Event(at=float(i), job_id="a", attempt=1, kind=kind, message=f"{i} is over") for i, kind in enumerate(kinds)
    ]
    shown = job_view.history(events)
    assert len(shown) == lines
    assert shown[:2] == [("00:00:00", "schedule: 0 is over"), ("00:00:01", "epoch: 1 is over")]
    assert shown[-2][1] == f"epoch: {epochs} is over"
    left_out = [text for time, text in shown if time == "..."]
    assert left_out == ([] if epochs == 9 else [f"epoch: {epochs - 8} more; --json has all"])
