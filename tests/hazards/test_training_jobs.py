"""Fine-tuning jobs whose models would have a replay lie: they train as in eager, and say why they do not replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainings import Attempt, lay_out, metrics, spec_of

MODEL = """
import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.ones(()))
        if kind == "hook":
            self.last.weight.register_hook(lambda g: g * 0.5)

    def forward(self, x):
        if self.kind == "first block":
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        elif self.kind == "dropping block":
            x = checkpoint(lambda t: nn.functional.dropout(self.first(t), 0.2), x, use_reentrant=False)
        else:
            x = self.first(x)
        if self.kind == "depth" and self.training and random.random() < 0.3:
            return self.last(x)
        if self.kind == "counter":
            self.calls += 1
            x = x / (1 + 0.01 * self.calls)
        if self.kind == "buffer":
            self.seen.add_(0.01)
            x = x / self.seen
        return self.last(self.norm(x).relu())


def first_block(): return Net("first block")
def dropping_block(): return Net("dropping block")
def depth(): return Net("depth")
def counter(): return Net("counter")
def buffer(): return Net("buffer")
def hook(): return Net("hook")
"""

REASONS = {
    "first_block": "require grad",
    "depth": "draws from Python's random module",
    "counter": "changes its attribute 'module.calls' in each call",
    "hook": "the parameter 'last.weight' has hooks on its gradient",
    "dropping_block": None,
    "buffer": None,
}


@pytest.mark.parametrize("name", REASONS)
def test_a_job_trains_as_one_without_schedules(name: str, tmp_path: Path) -> None:
    """Weights and losses are those of the same job in eager; a fallback is an event with its reason."""
    lay_out(tmp_path)
    (tmp_path / "hazard.py").write_text(MODEL)
    changes = {
        "model__source": f"python:{tmp_path}/hazard.py:{name}",
        "schedule": {"streams": 1, "fuse": "off", "progressive": False},
    }
    replayed = Attempt(spec_of(tmp_path, output="one/net", **changes))
    outcome = replayed.run()
    changes["schedule"] = {"on_miss": "eager"}
    eager = Attempt(spec_of(tmp_path, output="two/net", **changes))
    eager.run()
    reason = REASONS[name]
    assert outcome.schedule is not None
    if reason is None:
        assert replayed.said("fallback") == []
        assert outcome.schedule["runs"] == "schedule"
    else:
        (said,) = replayed.said("fallback")
        assert said.startswith("runs in eager: ")
        assert reason in said
        assert reason in outcome.schedule["fallback"]
    found, expected = (load_file(tmp_path / folder / "net" / "model.safetensors") for folder in ("one", "two"))
    for weight, tensor in expected.items():
        torch.testing.assert_close(found[weight], tensor, rtol=2e-3, atol=1e-5, msg=weight)
    losses = [[line["loss"] for line in metrics(tmp_path / folder / "net", "step")] for folder in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_the_first_block_behind_a_checkpoint_is_trained(tmp_path: Path) -> None:
    """Its weights move, though autograd shows them to none that asks for their gradients by name."""
    lay_out(tmp_path)
    (tmp_path / "hazard.py").write_text(MODEL)
    weights = []
    for epochs in (1, 2):
        changes = {"model__source": f"python:{tmp_path}/hazard.py:first_block", "train__epochs": epochs}
        attempt = Attempt(spec_of(tmp_path, output=f"{epochs}/net", **changes))
        attempt.run()
        weights.append(load_file(tmp_path / str(epochs) / "net" / "model.safetensors")["first.1.weight"])
    assert float((weights[0] - weights[1]).norm()) > 1e-3
