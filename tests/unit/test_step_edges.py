"""Gradients in fp32 where rounding decides: right is what eager has for weights next to these, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from nimble_jobs import Nimble
from nimble_jobs.errors import CheckFailed
from nimble_jobs.planner.step import compare
from nimble_jobs.planner.step.build import OptimizerRecipe, StepRequest, prepare_step
from nimble_jobs.planner.step.compare import largest, near_eager

WIDTH = 64
ZEROS = 2
SHARE = 0.3  # of the other gradients: what a ReLU adds to the gradient of a weight


def test_the_first_neighbour_that_is_like_it_counts() -> None:
    asked = []

    def neighbour(number: int) -> float:
        asked.append(number)
        if number < 2:
            raise CheckFailed("differs", error=0.5)
        return 0.25

    assert near_eager(CheckFailed("differs", error=0.02), neighbour) == 0.25
    assert asked == [0, 1, 2]


def test_none_is_like_it() -> None:
    asked, refused = [], CheckFailed("differs", error=0.02)

    def neighbour(number: int) -> float:
        asked.append(number)
        raise CheckFailed("differs too", error=0.01)

    with pytest.raises(CheckFailed) as caught:
        near_eager(refused, neighbour)
    assert caught.value is refused
    assert asked == list(range(compare._NEIGHBOURS))


@pytest.mark.parametrize("error", [0.21, None])
def test_what_no_edge_explains_is_refused_at_once(error: float | None) -> None:
    """A large difference, and one that is not finite."""
    with pytest.raises(CheckFailed, match="differs"):
        near_eager(CheckFailed("differs", error=error), lambda _: pytest.fail("eager runs again"))


@pytest.mark.parametrize("largest_of_all", [0.3, None])
def test_the_largest_difference_is_told(largest_of_all: float | None) -> None:
    """Not the first one; one that is not finite is larger than any."""

    def differs(error: float | None) -> float:
        raise CheckFailed(f"by {error}", error=error)

    errors = (0.02, largest_of_all, 0.1)
    with pytest.raises(CheckFailed, match=f"by {largest_of_all}"):
        largest([lambda: 0.01, *(partial(differs, error) for error in errors)])
    assert largest([lambda: 0.01, lambda: 0.02]) == 0.02
    assert largest([]) == 0.0


def test_fp64_is_disturbed_by_its_own_roundings() -> None:
    torch.manual_seed(0)
    unit = 2.0**-53
    plain = torch.randn(1000, dtype=torch.float64) * 1e-100  # beyond what fp32 can hold
    moved = [plain.clone(), plain.clone()]
    for seed, tensor in enumerate(moved):
        compare.disturb([tensor], compare.ROUNDINGS * unit, seed)
        changes = ((tensor - plain) / plain).abs().max()
        assert 4 * unit < changes <= (compare.ROUNDINGS + 2) * unit
    assert not torch.equal(*moved)


class Edge(nn.Module):
    """Adds a ReLU of a value that is 0, which rounding makes positive while it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.right = nn.Parameter(self.left.detach()[:1].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edge = self.left[:1] - self.right
        if is_in_torch_dispatch_mode():
            edge = edge + 2.0**-24 * self.left.detach()[:1]
        added = 4 * self.right + SHARE * edge.relu()
        # Of the gradient of `right` the edge is a share of 0.075, and of that of `left` no more, whatever the input is.
        return 4 * x * self.left + nn.functional.pad(added, (0, WIDTH - 1)) * x


class Zeros(nn.Module):
    """Adds a ReLU of zeros, whose gradient is that of the identity while it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = (self.left - self.left.detach())[:ZEROS]
        zero = zero if is_in_torch_dispatch_mode() else zero.relu()
        return x * self.left + SHARE * nn.functional.pad(zero, (0, WIDTH - ZEROS)) * x


class Wrong(nn.Module):
    """While it is recorded, what it adds changes no output, and the gradient of `left` by so large a share; `seldom`
    only where the sum of the input is large, which is for one input of ten.
    """

    def __init__(self, share: float, *, seldom: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.share, self.seldom = share, seldom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.left
        if is_in_torch_dispatch_mode():
            more = self.share * x * (self.left - self.left.detach())
            here = x.sum() > 1.28 * x.numel() ** 0.5 if self.seldom else torch.tensor(True)
            y = y + torch.where(here, more, torch.zeros_like(more))
        return y


def check_of_both_passes(module: nn.Module) -> None:
    Nimble(module).prepare(torch.randn(8, WIDTH), training=True, fuse="off")


def check_of_a_job(module: nn.Module, **more: Any) -> None:
    request = StepRequest(
        module=module.train(),
        x=torch.randn(8, WIDTH),
        y=torch.randint(0, WIDTH, (8,)),
        loss=nn.functional.cross_entropy,
        loss_name="cross_entropy",
        **{"optimizer": OptimizerRecipe(name="sgd"), **more},
    )
    step = prepare_step(request, device=torch.device("cpu"))
    if step.schedule is None:
        raise CheckFailed(step.fallback)


CHECKS = pytest.mark.parametrize("check", [check_of_both_passes, check_of_a_job])


@CHECKS
def test_rounding_may_decide(check: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is accepted, and not without a neighbour."""
    check(Edge())
    monkeypatch.setattr(compare, "_NEIGHBOURS", 0)
    with pytest.raises(CheckFailed, match="differs from eager by a relative norm"):
        check(Edge())


@CHECKS
@pytest.mark.parametrize("before", [nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)], ids=["norm", "dropout"])
def test_rounding_may_decide_behind_other_layers(
    check: Callable[[nn.Module], None], before: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disturbed run begins with the same statistics and draws the same mask."""
    check(nn.Sequential(before, Edge()))
    monkeypatch.setattr(compare, "_NEIGHBOURS", 0)
    with pytest.raises(CheckFailed, match="differs from eager by a relative norm"):
        check(nn.Sequential(before, Edge()))


@pytest.mark.parametrize(
    "more",
    [{"accumulate": 2}, {"optimizer": OptimizerRecipe(name="adamw", weight_decay=0.1)}, {"clip_norm": 0.1}],
    ids=str,
)
def test_rounding_may_decide_in_other_steps(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_of_a_job(Edge(), **more)
    monkeypatch.setattr(compare, "_NEIGHBOURS", 0)
    with pytest.raises(CheckFailed, match="differs from eager by a relative norm"):
        check_of_a_job(Edge(), **more)


@CHECKS
def test_what_eager_computes_at_no_neighbour_is_refused(check: Callable[[nn.Module], None]) -> None:
    """Zeros stay zeros, however they are disturbed."""
    with pytest.raises(CheckFailed, match="differs from eager by a relative norm"):
        check(Zeros())


@CHECKS
@pytest.mark.parametrize("share", [0.012, 0.03, 0.3])
def test_a_gradient_that_is_wrong_is_refused(check: Callable[[nn.Module], None], share: float) -> None:
    """Also one that is wrong by as little as an edge may explain."""
    with pytest.raises(CheckFailed, match=r"left' differs from eager by a relative norm"):
        check(Wrong(share, seldom=False))


@CHECKS
@pytest.mark.parametrize("share", [0.03, 0.3])
def test_a_gradient_that_is_seldom_wrong_is_refused(check: Callable[[nn.Module], None], share: float) -> None:
    """Each of 80 checks takes at least two inputs, so one of them meets such an input."""

    def often() -> None:
        for _ in range(80):
            check(Wrong(share, seldom=True))

    with pytest.raises(CheckFailed, match=r"left.* differs from eager by a relative norm"):
        often()
