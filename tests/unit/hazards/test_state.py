"""State that calls change: snapshots, what several calls show, and scoring models that advance buffers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.engine.inputs import varied
from nimble_jobs.engine.observe import observe
from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.engine.state import Snapshot
from nimble_jobs.errors import CannotRecord
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.keys.options import BuildOptions

CPU = torch.device("cpu")


class Advances(nn.Module):
    """A buffer and a parameter that each call moves, and an output that depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("n", torch.zeros(()))
        self.seen = [torch.zeros(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.linear.bias.add_(1)
        return self.linear(x) * self.n


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"list": [1], "set": {2}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["list"].append(3)
        return x * len(self.kept["list"])


def test_a_build_leaves_state_and_random_numbers_as_they_were() -> None:
    """Parameters that calls write included; the schedule then goes on from there as eager does."""
    net = Advances().eval()
    twin = Advances().eval()
    twin.load_state_dict(net.state_dict())
    x, options = torch.randn(2, 3), BuildOptions(streams=1, fuse="off", eager="reference")
    before = (random.getstate(), str(np.random.get_state()), torch.get_rng_state())
    built = build_best(net, {"x": x}, "key", options, CPU)
    assert built.failure is None
    assert (before[0], before[1]) == (random.getstate(), str(np.random.get_state()))
    assert torch.equal(before[2], torch.get_rng_state())
    for name, tensor in twin.state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor)
    for _ in range(3):
        x = torch.randn(2, 3)
        built.instance.inputs["x"].copy_(x)
        built.instance.replay()
        with torch.no_grad():
            torch.testing.assert_close(built.instance.outputs["output"], twin(x))
    assert float(net.n) == 3


def test_a_snapshot_puts_back_containers_and_parameters_that_are_written() -> None:
    """Lists and sets in attributes; parameters once they were about to be written."""
    net, other = Advances(), Grows()
    bias = net.linear.bias.detach().clone()
    snapshot, further = Snapshot(net), Snapshot(other)
    with torch.no_grad(), snapshot.watching():
        net(torch.ones(1, 3))
    other(torch.ones(1))
    other.kept["set"].add(9)
    other.late = 3
    assert set(snapshot.changing()) == {"n", "linear.bias"}
    snapshot.put_back()
    further.put_back()
    assert torch.equal(net.linear.bias, bias)
    assert (other.kept, hasattr(other, "late")) == ({"list": [1], "set": {2}}, False)


def test_what_python_draws_and_counts_is_refused_by_name() -> None:
    """Before anything is recorded; the states are put back."""

    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * np.random.rand()

    states = RandomStates(CPU)
    with pytest.raises(CannotRecord, match=r"draws from numpy\.random"):
        observe(Draws(), {"x": torch.ones(2)}, [], CPU)
    assert states.changed() is None
    with pytest.raises(CannotRecord, match="changes its attribute 'kept' in each call"):
        observe(Grows(), {"x": torch.ones(2)}, [], CPU)


def test_integers_are_varied_within_what_a_model_can_take() -> None:
    """Lengths of one dimension differ; sorted offsets stay sorted from the same start to the same end."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 5, 5])
    assert any(not torch.equal(varied(lengths, generator, turn), lengths) for turn in range(3))
    offsets = torch.tensor([0, 2, 7, 7, 12])
    for turn in range(4):
        found = varied(offsets, generator, turn)
        assert bool((found[1:] >= found[:-1]).all())
        assert (int(found[0]), int(found[-1])) == (0, 12)
    mask = torch.ones(2, 6, dtype=torch.int64)
    right, left = varied(mask, generator, 0), varied(mask, generator, 1)
    assert bool((right[:, 1:] <= right[:, :-1]).all())
    assert bool((left[:, 1:] >= left[:, :-1]).all())


def test_a_stored_schedule_begins_from_the_modules_own_state(tmp_path: Path) -> None:
    """A hit is checked over several calls, which leave no trace either."""
    for _ in range(2):
        torch.manual_seed(0)
        net, twin = Advances().eval(), Advances().eval()
        twin.load_state_dict(net.state_dict())
        nimble = Nimble(net)
        nimble.prepare(torch.randn(2, 3), store=tmp_path / "state", streams=1, fuse="off")
        for _ in range(4):
            x = torch.randn(2, 3)
            with torch.no_grad():
                torch.testing.assert_close(nimble(x), twin(x))
        assert float(net.n) == 4
