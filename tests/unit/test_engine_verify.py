"""How far two results are apart."""

from __future__ import annotations

import math

import pytest
import torch

from nimble_jobs.engine.verify import relative_norm

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "norm"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [0.0, 5.0], math.sqrt(10) / 5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], INF),
        ([INF, 3.0, NAN], [INF, 4.0, NAN], 0.25),
        ([-INF, 4.0], [INF, 4.0], INF),
        ([NAN, 4.0], [4.0, NAN], INF),
        ([NAN, 4.0], [3.0, 4.0], INF),
        ([INF, 4.0], [3.0, 4.0], INF),
        ([1e30, 4.0], [1e30, 4.0], 0.0),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], INF),
    ],
)
def test_relative_norm(found: list[float], expected: list[float], norm: float) -> None:
    """What is not finite must stand in the same places; nothing is relative to zero but zero."""
    assert relative_norm(torch.tensor(found), torch.tensor(expected)) == pytest.approx(norm)
