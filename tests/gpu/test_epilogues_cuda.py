"""Convolutions with what follows them, on the device: each way agrees with eager, and all are measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import epilogues
from nimble_jobs.engine.capture import capture
from nimble_jobs.engine.epilogues import Group, Way
from nimble_jobs.engine.private import forget_compiled
from nimble_jobs.engine.record import state_of
from nimble_jobs.engine.verify import check
from nimble_jobs.planner.source import Source, Variants, record_source

OPERATORS = {
    "fused": {"nimble_jobs.convolution_relu.default", "nimble_jobs.convolution_add_relu.default"},
    "product": {"aten._addmm_activation.out", "aten.mm.out"},
}


class Block(nn.Module):
    """A bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(64, 16, 1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.wide = nn.Conv2d(16, 64, 1)
        self.after = nn.Conv2d(64, 32, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.narrow(x).relu()).relu()
        return self.after((self.wide(y) + x).relu())


@pytest.mark.parametrize("way", ["fused", "product"])
def test_each_way_agrees_with_eager(device: torch.device, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """Wherever it is possible, on a captured replay over fresh inputs."""

    def wanted(group: Group, _: torch.device) -> Way:
        possible = group.is_product if way == "product" else group.follows.endswith("relu")
        return way if possible else "library"

    monkeypatch.setattr(epilogues, "fastest", wanted)
    torch.manual_seed(0)
    module = Block().eval().to(device, torch.float16)
    variants = Variants(module)
    bound = variants.use("channels-last")
    x = torch.randn(2, 64, 28, 28, device=device, dtype=torch.float16)
    with torch._inductor.config.patch(force_disable_caches=True):
        recording = record_source(bound, Source(kernels="epilogues", layout="channels-last"), {"x": x}, device)
    assert {task.op for task in recording.program.tasks} >= OPERATORS[way]
    plan, _ = graph.make_plan(recording.program, max_streams=2)
    state = state_of(bound)
    instance = capture(
        recording.program, plan, state=state, constants=recording.constants, device=device, kernels=recording.kernels
    )
    for seed in range(3):
        check(instance, module, recording.program.inputs, device, tolerance=1e-2, seed=seed)
    instance.close()
    forget_compiled()


def test_ways_are_measured(device: torch.device) -> None:
    """A 1x1 convolution with ReLU has three ways, each with a time; the choice is one of them and stays."""
    one = (1, 1)
    group = Group(
        dtype=torch.float16,
        x=(1, 256, 14, 14),
        weight=(64, 256, 1, 1),
        out=(1, 64, 14, 14),
        bias=True,
        stride=one,
        padding=(0, 0),
        dilation=one,
        groups=1,
        follows="relu",
    )
    times = epilogues.times_us(group, device)
    assert times.keys() == {"library", "fused", "product"}
    assert all(us > 0 for us in times.values())
    chosen = epilogues.fastest(group, device)
    assert chosen in times
    assert epilogues.fastest(group, device) == chosen
