"""Gradients that rounding moves: what is accepted is what eager itself does, and no more."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nimble_jobs.errors import CheckFailed
from nimble_jobs.planner.step.compare import allowed_norm, compare_gradient, disturb, matters, noise_of, unit_roundoff

CPU = torch.device("cpu")


def test_units_are_those_of_the_narrowest_type() -> None:
    assert unit_roundoff([torch.float32], CPU) == 2.0**-24
    assert unit_roundoff([torch.float32, torch.bfloat16, torch.int64], CPU) == 2.0**-8
    assert unit_roundoff([torch.int64], CPU) == 2.0**-24
    assert not matters(unit_roundoff([torch.float32], CPU))
    assert matters(unit_roundoff([torch.float16], CPU))


def test_values_move_by_at_most_the_unit_and_integers_not_at_all() -> None:
    wide, narrow, whole = torch.linspace(1, 2, 1000), torch.ones(1000, dtype=torch.bfloat16), torch.arange(5)
    before = wide.clone()
    disturb([wide, narrow, whole], 2.0**-8, seed=1)
    moved = (wide / before - 1).abs()
    assert 2.0**-10 < float(moved.max()) <= 2.0**-8 * 1.001
    assert narrow.float().unique().numel() > 1
    assert whole.tolist() == [0, 1, 2, 3, 4]


def _gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(x).float().square().mean()
    names = [n for n, _ in module.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(module.parameters())), strict=True))


def test_what_another_memory_format_gives_is_within_what_rounding_allows() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    module, x = nn.Sequential(*layers), torch.randn(8, 3, 12, 12)
    expected = _gradients(module, x)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    other = x.clone()
    disturb([*module.parameters(), other], unit_roundoff([torch.bfloat16], CPU), seed=3)
    noise = noise_of(_gradients(module, other), expected)
    module.load_state_dict(before, strict=False)
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = _gradients(module, x.contiguous(memory_format=torch.channels_last))
    differ = {n: float((found[n] - g).norm() / g.norm()) for n, g in expected.items()}
    assert max(differ.values()) > 0.02  # more than a strict comparison would take for the first layers
    for name, gradient in expected.items():
        compare_gradient(name, found[name], gradient, 0.0, float(gradient.abs().max()) * 1e-3, noise[name])
        with pytest.raises(CheckFailed, match="0"):
            compare_gradient(name, torch.zeros_like(gradient), gradient, 0.0, 0.0, noise[name])


def test_with_little_noise_the_slack_decides() -> None:
    expected = torch.ones(100)
    assert compare_gradient("w", expected * 1.05, expected, 0.1, 0.0, 0.0) == pytest.approx(0.05)
    with pytest.raises(CheckFailed, match=r"'w' differs from eager by a relative norm of 0\.2"):
        compare_gradient("w", expected * 1.2, expected, 0.1, 0.0, 0.01)


def test_a_large_slack_alone_still_compares_values() -> None:
    expected = torch.ones(100)
    assert compare_gradient("w", expected * 0.2, expected, 1.0, 0.0, 0.0) == pytest.approx(0.8)
    with pytest.raises(CheckFailed, match=r"'w' differs from eager by a relative norm of 2; the tolerance is 1"):
        compare_gradient("w", -expected, expected, 1.0, 0.0, 0.0)


def test_noise_of_what_is_nearly_zero_counts_by_its_own_size() -> None:
    """A thousandth of the floor may be many times itself, and not many times the floor."""
    expected = torch.full((100,), 1e-3)
    assert compare_gradient("w", expected * 30, expected, 0.0, 1.0, 10.0) == pytest.approx(0.029)
    with pytest.raises(CheckFailed, match=r"a relative norm of 0\.999; the tolerance is 0\.5"):
        compare_gradient("w", expected * 1000, expected, 0.5, 1.0, 10.0)


@pytest.mark.parametrize("factor", [0.0, 0.4, 2.5, math.inf, math.nan])
def test_where_values_tell_nothing_sizes_do(factor: float) -> None:
    expected = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    other = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    assert compare_gradient("w", other, expected, 0.1, 0.0, 1.3) == 0.0
    with pytest.raises(CheckFailed, match="as large as in eager; rounding alone moves it"):
        compare_gradient("w", other * factor, expected, 0.1, 0.0, 1.3)


@pytest.mark.parametrize(
    ("tolerance", "noise", "allowed"), [(0.01, 0.0, 0.01), (0.01, 0.003, 0.01), (0.01, 0.01, 0.03), (0.01, 5.0, 0.7)]
)
def test_what_rounding_leaves_open_is_allowed(tolerance: float, noise: float, allowed: float) -> None:
    """Three times eager's own noise where that is more than the tolerance, and never what says nothing."""
    assert allowed_norm(tolerance, noise) == pytest.approx(allowed)
