"""Trainings of modules made of steps in any order: equal to eager over five updates, or refused."""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hazards.test_training_modules import Custom, ListInBackward
from tests.hazards.training import judge, seeded


def _counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.turn += 1
    return x / m.turn


def _averages(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - m.average


def _swaps(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.average = 0.9 * m.average + 0.1 * x.detach().mean(0)
    return x - m.average


def _hooks(_m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)
    return y


def _behind(m: Any, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    found: torch.Tensor = checkpoint(lambda t: nn.functional.dropout(m.third(t), 0.3), x, use_reentrant=reentrant)
    return found


# Each takes and gives 4 x 3 numbers.
STEPS: dict[str, Any] = {
    "first": lambda m, x: m.first(x),
    "second": lambda m, x: m.second(x).tanh(),
    "norm": lambda m, x: m.norm(x),
    "dropout": lambda _m, x: nn.functional.dropout(x, 0.4),
    "in place": lambda _m, x: (x * 1).add_(1).mul_(0.5),
    "a view": lambda _m, x: x.t().contiguous().view(3, 4).t(),
    "checkpoint": functools.partial(_behind, reentrant=False),
    "reentrant checkpoint": functools.partial(_behind, reentrant=True),
    "a backward of its own": lambda _m, x: Custom.apply(x),
    "a host read in a backward": lambda _m, x: ListInBackward.apply(x),
    "a host read": lambda _m, x: x if float(x.sum()) > 0 else -x,
    "a counter": _counts,
    "a moving average": _averages,
    "an average that is replaced": _swaps,
    "a hook": _hooks,
    "Python's random": lambda _m, x: x * random.random(),
    "noise": lambda _m, x: x + 0.1 * torch.randn_like(x),
    "detached": lambda _m, x: x.detach() + x,
    "the input": lambda m, x: x + m.given,
}


class Chain(nn.Module):
    """Steps one after another, over layers that several of them may use."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("average", torch.zeros(3))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["given"] = x
        for name in self.names:
            x = STEPS[name](self, x)
        del self.__dict__["given"]
        return x


def trains(names: list[str]) -> bool:
    """Whether eager can take a step."""
    seeded(0)
    module = Chain(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checkpoints over what needs no gradient
        try:
            module(torch.randn(4, 3)).sum().backward()
        except RuntimeError:
            return False
    return any(p.grad is not None for p in module.parameters())


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.booleans())
def test_any_steps(names: list[str], grad: bool) -> None:
    """Outputs, gradients, state and random states, with and without an input that requires grad."""
    assume(trains(names))
    judge(lambda: Chain(names), grad=grad)
