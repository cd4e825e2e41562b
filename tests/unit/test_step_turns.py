"""Repeated checks of a training step: what a single sign may explain is tried on other input, all else is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from nimble_jobs import Nimble
from nimble_jobs.errors import CheckFailed
from nimble_jobs.planner.step.build import OptimizerRecipe, StepRequest, prepare_step
from nimble_jobs.planner.step.compare import GradientDiffers
from nimble_jobs.planner.step.turns import MOST_TURNS, confirm, in_turns

WIDTH = 64


def differing(error: float | None, *, repeats: bool = True) -> GradientDiffers:
    found = GradientDiffers("differs", error=error)
    found.repeats = repeats
    return found


def turns(*ends: Exception | None) -> Callable[[int], int]:
    """Turns that end like this, one after another."""

    def turn(number: int) -> int:
        end = ends[number]
        if end is not None:
            raise end
        return number

    return turn


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ([None, None], [0, 1]),
        ([differing(0.02), None, differing(0.1), None], [1, 3]),
        ([differing(0.02)] * (MOST_TURNS - 2) + [None, None], [MOST_TURNS - 2, MOST_TURNS - 1]),
    ],
)
def test_as_many_turns_must_pass_as_ever(ends: Sequence[Exception | None], found: list[int]) -> None:
    assert in_turns(turns(*ends), rough=False) == found


@pytest.mark.parametrize(
    ("ends", "rough"),
    [
        ([differing(0.02)] * (MOST_TURNS - 1), False),  # no longer two turns left
        ([None, differing(0.11)], False),  # too much for a sign
        ([None, differing(None)], False),  # not finite
        ([None, differing(0.02, repeats=False)], False),  # not the same twice: a race
        ([differing(0.02), None, None], True),  # eager said what rounding does
        ([None, CheckFailed("output", error=0.002)], False),
    ],
)
def test_the_rest_is_refused(ends: Sequence[Exception | None], rough: bool) -> None:
    with pytest.raises(CheckFailed):
        in_turns(turns(*ends), rough=rough)


@pytest.mark.parametrize(
    ("again", "repeats"),
    [(differing(0.0205), True), (differing(0.04), False), (differing(None), False), (None, False)],
)
def test_a_difference_repeats_if_the_same_replay_differs_as_much(again: Exception | None, repeats: bool) -> None:
    error = GradientDiffers("differs", error=0.02)

    def replay() -> None:
        if again is not None:
            raise again

    confirm(error, replay)
    assert error.repeats == repeats


class Recorded(nn.Module):
    """While it is recorded, what it adds changes no output, and the gradient of `left` by so large a share; `at_edges`
    only where the sum of the input is large, which is for one input of ten.
    """

    def __init__(self, share: float, *, at_edges: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.share, self.at_edges = share, at_edges

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.left + self.bias
        if is_in_torch_dispatch_mode():
            more = self.share * x * (self.left - self.left.detach())
            y = y + (
                torch.where(x.sum() > 1.28 * x.numel() ** 0.5, more, torch.zeros_like(more)) if self.at_edges else more
            )
        return y


def check_of_both_passes(module: nn.Module) -> None:
    Nimble(module).prepare(torch.randn(8, WIDTH), training=True, fuse="off")


def check_of_a_job(module: nn.Module) -> None:
    request = StepRequest(
        module=module.train(),
        x=torch.randn(8, WIDTH),
        y=torch.randint(0, WIDTH, (8,)),
        loss=nn.functional.cross_entropy,
        loss_name="cross_entropy",
        optimizer=OptimizerRecipe(name="sgd"),
    )
    step = prepare_step(request, device=torch.device("cpu"))
    if step.schedule is None:
        raise CheckFailed(step.fallback)


CHECKS = pytest.mark.parametrize("check", [check_of_both_passes, check_of_a_job])


@CHECKS
@pytest.mark.parametrize("share", [0.03, 0.3])
def test_a_gradient_that_is_always_wrong_is_refused(check: Callable[[nn.Module], None], share: float) -> None:
    """Also one that is wrong by as little as a sign may explain."""
    with pytest.raises(CheckFailed, match=r"left' differs from eager by a relative norm"):
        check(Recorded(share, at_edges=False))


@CHECKS
def test_a_gradient_that_seldom_differs_by_little_is_not(check: Callable[[nn.Module], None]) -> None:
    for _ in range(5):
        check(Recorded(0.012, at_edges=True))


@CHECKS
def test_one_that_seldom_differs_by_much_is_refused(check: Callable[[nn.Module], None]) -> None:
    """Each of 80 checks takes at least two inputs, so one of them meets such an input."""

    def often() -> None:
        for _ in range(80):
            check(Recorded(0.3, at_edges=True))

    with pytest.raises(CheckFailed, match=r"left.* differs from eager by a relative norm"):
        often()
