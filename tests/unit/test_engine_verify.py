"""How far two results are apart, and the check of several instances against eager."""

from __future__ import annotations

import math

import pytest
import torch

from nimble_jobs.engine import verify
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.errors import CheckFailed
from nimble_jobs.graph import Analysis

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


class Off:
    """An instance whose results are `by` too large in one place."""

    def __init__(self, instance: Instance, by: float) -> None:
        self._instance, self._by = instance, by
        self.inputs, self.outputs, self.bytes = instance.inputs, instance.outputs, instance.bytes

    def replay(self) -> None:
        self._instance.replay()
        self.outputs = self._instance.outputs
        next(iter(self.outputs.values())).view(-1)[0] += self._by

    def close(self) -> None:
        self._instance.close()


@pytest.mark.parametrize("by", [1.0, NAN])
def test_each_instance_must_agree_with_eager(by: float) -> None:
    """The first, and any further one."""
    torch.manual_seed(0)
    module, device = torch.nn.Linear(8, 8), torch.device("cpu")
    recording = record(module, {"x": torch.randn(4, 8)}, state_of(module), device)
    plan, _ = Analysis.of(recording.program).single_stream()

    def instance() -> Instance:
        return capture(recording.program, plan, state=state_of(module), constants=recording.constants, device=device)

    def checked(*instances: Instance) -> float:
        ports = recording.program.inputs
        return verify.check(instances[0], module, ports, device, tolerance=1e-3, seed=1, others=instances[1:])

    assert checked(instance(), instance(), Off(instance(), 1e-6)) < 1e-5
    for place in range(3):
        instances: list[Instance] = [instance() for _ in range(3)]
        instances[place] = Off(instances[place], by)
        with pytest.raises(CheckFailed):
            checked(*instances)
