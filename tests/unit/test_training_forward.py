"""Validations replay the model over its live weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs.planner.options import BuildOptions
from nimble_jobs.workloads.training.forward import Forward
from nimble_jobs.workloads.training.setup import evaluating


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, 4))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replays_follow_the_weights(dtype: str) -> None:
    """What a training changes between validations, weights and statistics, is what the next one sees."""
    module = net().train()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    forward = Forward(module, dtype)
    x = torch.randn(6, 1, 6, 6)
    state = torch.get_rng_state()
    assert forward.capture(x, BuildOptions(), tolerance=0.05) is None
    assert torch.get_rng_state().equal(state)
    assert all(part.training for part in module.modules())
    assert all(t.equal(before[name]) for name, t in module.state_dict().items())
    seen = []
    for _ in range(2):
        with evaluating(module):
            expected = Forward(module, dtype)(x)
            found = forward(x)
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
            short = forward(x[:2])
            assert torch.allclose(short, expected[:2], rtol=0.1, atol=1e-2)
        seen.append(found.clone())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1)
        module(torch.randn(9, 1, 6, 6))  # moves the statistics
    assert not torch.allclose(*seen)
    forward.close()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x), "twice": self.layer(x) * 2}


class Reads(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x) * float(x.abs().max())


@pytest.mark.parametrize(("kind", "why"), [(Two, "more than one tensor"), (Reads, "host|item|_local_scalar_dense")])
def test_what_cannot_be_replayed_runs_in_eager(kind: type[nn.Module], why: str) -> None:
    """The reason is there, and the answer is the model's own."""
    module = kind().train()
    forward = Forward(module, "fp32")
    x = torch.randn(4, 3)
    reason = forward.capture(x, BuildOptions(), tolerance=0.05)
    assert reason is not None
    assert any(word in reason for word in why.split("|")), reason
    with evaluating(module):
        found, expected = forward(x), module(x)
    assert isinstance(found, type(expected))
