"""How a training looks to whoever watches it."""

from __future__ import annotations

import pytest

from nimble_jobs.cli import render


@pytest.mark.parametrize(
    ("timings", "text"),
    [
        ({}, ""),
        ({"steps_per_s": 3.0}, ""),
        ({"loss": 0.08123, "steps_per_s": 312.4}, "loss 0.0812, 312/s steps"),
        ({"loss": 1.5, "accuracy": 0.975, "steps_per_s": 4.66}, "loss 1.5, accuracy 97.5%, 4.7/s steps"),
        ({"records_per_s": 12.0, "run_s": 3.0}, ""),
    ],
)
def test_a_training_under_way(timings: dict[str, float], text: str) -> None:
    """Loss, accuracy where there is one, and steps a second, once they are known."""
    assert render.training(timings) == text
