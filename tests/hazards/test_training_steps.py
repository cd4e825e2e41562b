"""Steps of fine-tuning jobs that try to be replayed wrongly: each trains as plain torch does, or runs in eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.hazards.test_training_modules import CASES, Small
from tests.hazards.training import Verdict, judge_step


def loss_of(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """The mean of squares of all that is returned, a little by the labels."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum((t.abs().square().mean() for t in tensors), start=torch.zeros(())) * (1 + 0.1 * y.float().mean())


# What a schedule can hold: no needless refusal.
RECORDED = {"reentrant checkpoint later", "checkpoint with dropout", "nested checkpoints with dropout", "tied weights"}


@pytest.mark.parametrize("name", CASES)
def test_a_step_trains_as_plain_torch_does(name: str) -> None:
    """Losses, weights, statistics and attributes over five updates, whether it replays or not."""
    verdict = judge_step(CASES[name], lambda: loss_of)
    assert name not in RECORDED or verdict == Verdict(kind="equal")


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


class Counting:
    """A loss that weighs by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, y) * self.calls


def _reads(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    weight = 2.0 if sum(y.tolist()) > 4 else 1.0
    return nn.functional.cross_entropy(outputs, y) * weight


def _items(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(outputs, y)
    return loss / max(1.0, loss.item())


def _numpy(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, y) * float(1 + np.asarray(y).mean())


def _draws(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, y) * random.random()


def _hooks(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    outputs.register_hook(lambda g: g * 3)
    return nn.functional.cross_entropy(outputs, y)


def _penalises(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(outputs, y)
    (g,) = torch.autograd.grad(loss, outputs, create_graph=True)
    return loss + g.square().sum()


LOSSES: dict[str, Any] = {
    "tolist": lambda: _reads,
    "item": lambda: _items,
    "numpy": lambda: _numpy,
    "a hook": lambda: _hooks,
    "a penalty of gradients": lambda: _penalises,
    "Python's random": lambda: _draws,
    "a counter": Counting,
}


REASONS = {
    "Python's random": "draws from Python's random module",
    "a counter": "changes its attribute '_loss' in each call",
    "tolist": "tolist",
    "a hook": "register_hook",
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_users_own_trains_as_plain_torch_does(name: str) -> None:
    """Host reads, random numbers, counters and hooks in a loss are right, or refused with a reason."""
    verdict = judge_step(_layers, LOSSES[name])
    assert REASONS.get(name, "") in str(verdict.reason)


def _masked(hook: Callable[[torch.Tensor], Any], way: str) -> nn.Module:
    module = _layers()
    getattr(module[0].weight, way)(hook)
    return module


def _halves(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _masked(lambda g: g * torch.tensor([1.0, 0.0, 1.0]), "register_hook"),
        lambda: _masked(_halves, "register_post_accumulate_grad_hook"),
    ],
    ids=["on the gradient", "after accumulation"],
)
def test_hooks_on_gradients_run_in_eager_and_say_so(make: Any) -> None:
    """A job's gradients never leave its step, so hooks on them have it run in eager."""
    verdict = judge_step(make, lambda: loss_of)
    assert verdict.reason == "the parameter '0.weight' has hooks on its gradient, which a replay would not call"


class Sometimes(nn.Module):
    """A layer that takes part in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.other(self.always(x)) if self.turn % 2 else self.always(x)


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"clip_norm": 0.1}, {"accumulate": 3, "clip_norm": 0.1}], ids=str
)
def test_accumulation_and_clipping_are_as_in_plain_torch(options: dict[str, Any]) -> None:
    """Recorded, with an unused layer beside it."""
    verdict = judge_step(lambda: Small(lambda m, x: m.first(x)), lambda: loss_of, **options)
    assert verdict == Verdict(kind="equal")


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_layer_that_takes_part_now_and_then_is_updated_as_by_plain_torch(accumulate: int) -> None:
    """Where any batch since the last update gave it a gradient, and only there."""
    verdict = judge_step(Sometimes, lambda: loss_of, accumulate=accumulate)
    assert str(verdict.reason).startswith("the model changes its attribute 'module.turn' in each call")
