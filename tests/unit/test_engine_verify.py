"""How far two results are apart."""

from __future__ import annotations

import math

import pytest
import torch

from nimble_jobs.engine.difference import relative_norm

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
        ([0.0, 4.0], [NAN, 4.0], INF),
        ([NAN, 4.0], [0.0, 4.0], INF),
        ([NAN, 4.0], [INF, 4.0], INF),
        ([1e30, 4.0], [1e30, 4.0], 0.0),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], INF),
    ],
)
def test_relative_norm(found: list[float], expected: list[float], norm: float) -> None:
    """What is not finite must stand in the same places; nothing is relative to zero but zero."""
    assert relative_norm(torch.tensor(found), torch.tensor(expected)) == pytest.approx(norm)


def test_the_largest_number_is_not_infinite() -> None:
    """One does not stand for the other."""
    largest = torch.finfo(torch.float64).max
    found, expected = (torch.tensor([first, 1.0], dtype=torch.float64) for first in (largest, INF))
    assert relative_norm(found, expected) == INF


def test_complex_numbers_are_compared_whole() -> None:
    """By both parts; and none equals a real one."""
    found, expected = torch.tensor([3 + 4j, 1j]), torch.tensor([3 + 0j, 1j])
    assert relative_norm(found, expected) == pytest.approx(4 / 10**0.5)
    assert relative_norm(expected.conj(), expected) == pytest.approx(2 / 10**0.5)
    assert relative_norm(expected, expected) == 0
    assert relative_norm(torch.tensor([1.0]), torch.tensor([1 + 0j])) == INF
