"""Functions of torch's that read the host without need: recorded as other operators, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs import Nimble

Forward = Callable[[torch.Tensor, torch.Tensor], Any]


class Net(nn.Module):
    """Calls a function with its inputs."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        return self.function(x, i)


def _set(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    y = x.clone()
    y[index] = value
    return y


FORMS: dict[str, Forward] = {
    "first": lambda x, i: x[i],
    "second": lambda x, i: x[:, i],
    "last": lambda x, i: x[..., i],
    "two": lambda x, i: x[i, :, i],
    "with a new dimension": lambda x, i: x[None, i, 1:],
    "with a number": lambda x, i: x[1, i],
    "set": lambda x, i: _set(x, i, 2.0),
    "set a slice": lambda x, i: _set(x, (slice(None), i), x[:, 0] * 2),
    "set the last": lambda x, i: _set(x, (Ellipsis, i), 1),
    "set two": lambda x, i: _set(x, (i, slice(1, 3), i), x[0, :2, 0]),
    "one_hot": lambda x, i: functional.one_hot(i.reshape(1) + 1, 5) * x[0, 0, 0],
    "quantile": lambda x, i: torch.quantile(x, 0.5, dim=1) + i,
}


@pytest.mark.parametrize("name", FORMS)
def test_what_torch_reads_without_need_is_recorded(name: str) -> None:
    """For positions from the start and from the end."""
    net = Net(FORMS[name])
    nimble = Nimble(net)
    nimble.prepare((torch.randn(4, 4, 4), torch.tensor(2)), streams=1, fuse="off")
    for position in (0, 3, 1, *((-1, -4) if "hot" not in name else ())):
        x, i = torch.randn(4, 4, 4), torch.tensor(position)
        torch.testing.assert_close(nimble(x, i), net(x, i))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_and_traced_submodules_are_recorded() -> None:
    """They take no hooks, so their tasks are named after the module around them."""
    x = torch.randn(2, 3)
    for inner in (torch.jit.script(nn.Linear(3, 3)), torch.jit.trace(nn.Linear(3, 3), x)):
        net = nn.Sequential(inner, nn.ReLU()).eval()
        nimble = Nimble(net)
        nimble.prepare(x, streams=1, fuse="off")
        torch.testing.assert_close(nimble(x * 2), net(x * 2).detach())
