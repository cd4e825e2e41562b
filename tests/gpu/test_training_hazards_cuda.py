"""Trainings that could be replayed wrongly, on a GPU: checkpoints with dropout, hooks on gradients, LSTM layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nimble_jobs import Nimble
from nimble_jobs.errors import EngineError


class Dropping(nn.Module):
    """Identity weights and a dropout behind a checkpoint: output and gradient show the same mask."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        nn.init.eye_(self.layer.weight)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(
            lambda t: nn.functional.dropout(self.layer(t), 0.5), x, use_reentrant=self.reentrant
        )
        return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_with_dropout_uses_the_forwards_mask(reentrant: bool) -> None:
    """In each of several replays, which draw other masks."""
    nimble = Nimble(Dropping(reentrant=reentrant).cuda())
    nimble.prepare(
        torch.ones(4, 64, device="cuda", requires_grad=True), training=True, streams=1, fuse="off", eager="reference"
    )
    masks = []
    for _ in range(3):
        x = torch.ones(4, 64, device="cuda", requires_grad=True)
        y = nimble(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach())
        masks.append(tuple(y.flatten().tolist()))
    assert len(set(masks)) == 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.recurrent(x)[0])
        return found


@pytest.mark.filterwarnings("ignore:RNN module weights")  # of the copy, which eager compacts at each call
def test_an_lstm_trains_as_in_eager_or_says_why_not() -> None:
    """cuDNN's layers, whose weights lie in one block of memory."""
    torch.manual_seed(0)
    module = Recurrent().cuda()
    twin = copy.deepcopy(module)
    x = torch.randn(2, 5, 8, device="cuda")
    nimble = Nimble(module)
    nimble.prepare(x, training=True, streams=1, fuse="off", fallback=True, eager="reference")
    for call, of in ((nimble, module), (twin, twin)):
        call(x).square().sum().backward()
        assert all(p.grad is not None for p in of.parameters())
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-3)


def test_hooks_run_once_and_second_derivatives_are_refused() -> None:
    """As on a CPU."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    twin = copy.deepcopy(module)
    for m in (module, twin):
        m[0].weight.register_hook(lambda g: 2 * g)
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    nimble = Nimble(module)
    nimble.prepare(x, training=True, streams=1, fuse="off", eager="reference")
    call: Any
    for call in (nimble, twin):
        call(x).sum().backward()
    torch.testing.assert_close(module[0].weight.grad, twin[0].weight.grad, rtol=1e-2, atol=1e-3)
    (g,) = torch.autograd.grad(nimble(x).sum(), x, create_graph=True)
    with pytest.raises(EngineError, match="second derivative"):
        g.square().sum().backward()
