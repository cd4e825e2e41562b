"""Training steps in fp32 whose gradients change where rounding decides a sign: right ones are accepted, others not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from nimble_jobs import Nimble
from nimble_jobs.errors import CheckFailed
from nimble_jobs.planner.step.build import OptimizerRecipe, StepRequest, prepare_step

WIDTH = 64


class Balanced(nn.Module):
    """Products that cancel, so that a ReLU meets zero. While it is recorded, what it adds to them is too little for any
    sum to show, and yet lets the ReLU pass all of them; or, if `wrong`, so much that it is no rounding.
    """

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.right = nn.Parameter(self.left.detach().clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = 1e-12 if is_in_torch_dispatch_mode() else 0.0
        passed = torch.relu(x * self.left - x * self.right + added)
        if self.wrong and added:
            passed = passed - x * self.left
        return passed + 4 * x * (self.left + self.right) + self.bias


@pytest.mark.parametrize("wrong", [False, True])
def test_both_passes(wrong: bool) -> None:
    nimble, x = Nimble(Balanced(wrong=wrong)), torch.randn(8, WIDTH)
    if not wrong:
        nimble.prepare(x, training=True, fuse="off")
        return
    with pytest.raises(CheckFailed, match="differs from eager by a relative norm"):
        nimble.prepare(x, training=True, fuse="off")


@pytest.mark.parametrize("wrong", [False, True])
def test_the_step_of_a_job(wrong: bool) -> None:
    request = StepRequest(
        module=Balanced(wrong=wrong).train(),
        x=torch.randn(8, WIDTH),
        y=torch.randint(0, WIDTH, (8,)),
        loss=nn.functional.cross_entropy,
        loss_name="cross_entropy",
        optimizer=OptimizerRecipe(name="sgd"),
    )
    step = prepare_step(request, device=torch.device("cpu"))
    assert (step.schedule is None) == wrong, step.fallback
    assert ("differs from eager by a relative norm" in (step.fallback or "")) == wrong
