"""Convolutions with what follows them, on the device: each way agrees with eager, and all are measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import capture
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.engine.record import state_of
from nimble_jobs.engine.verify import check
from nimble_jobs.kernel_switches import NOTHING, Kernel, Without
from nimble_jobs.kernels import epilogue_ways, epilogues
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.epilogue_ways import Group, Way
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.sources.source import Source, Variants, record_source

OPERATORS = {
    "fused": {"nimble_jobs.convolution_relu.default", "nimble_jobs.convolution_add_relu.default"},
    "product": {"aten._addmm_activation.out", "aten.mm.out"},
    "pointwise 32x32x64": {
        "triton.pointwise.float16.1568x64x16.relu.32x32x64",
        "triton.pointwise.float16.1568x16x64.sum-relu.32x32x64",
    },
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


@pytest.mark.parametrize("way", list(OPERATORS))
def test_each_way_agrees_with_eager(device: torch.device, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """Wherever it is possible, on a captured replay over fresh inputs."""

    def wanted(group: Group, *_: object) -> Way:
        possible = group.is_product if way != "fused" else group.follows.endswith("relu")
        return way if possible else "library"

    monkeypatch.setattr(epilogues, "fastest", wanted)
    torch.manual_seed(0)
    module = Block().eval().to(device, torch.float16)
    variants = Variants(module)
    bound = variants.use(Source(kernels="eager", layout="channels-last"))
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
    times = epilogue_ways.times_us(group, device)
    assert times.keys() == {"library", "fused", "product", "pointwise 16x32x64", "pointwise 32x32x64"}
    assert all(us > 0 for us in times.values())
    chosen = epilogue_ways.fastest(group, device)
    assert chosen in times
    assert epilogue_ways.fastest(group, device) == chosen


def test_ways_that_are_off_are_in_no_recording(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Inductor's caches at work: a graph that was compiled with all ways is not taken for one without some."""

    def last_is_fastest(group: Group, _: torch.device, off: Without) -> dict[Way, float]:
        return {way: 9.0 - number for number, way in enumerate(group.allowed(off))}

    monkeypatch.setattr(epilogue_ways, "times_us", last_is_fastest)
    ours = OPERATORS["fused"] | OPERATORS["product"]
    module = Block().eval().to(device, torch.float16)
    x = torch.randn(2, 64, 28, 28, device=device, dtype=torch.float16)
    off = frozenset({Kernel.FUSED_CONVOLUTION, Kernel.PRODUCT, Kernel.POINTWISE, Kernel.SPLIT_K})
    for without in (NOTHING, off, NOTHING):
        source = Source(kernels="epilogues", layout="channels-last", without=without)
        with using(Choices()):
            recording = record_source(Variants(module).use(source), source, {"x": x}, device)
        found = [task.op for task in recording.program.tasks]
        assert any(op in ours or op.startswith("triton.pointwise.") for op in found) == (without == NOTHING)
    forget_compiled()


def test_kernels_chosen_in_a_crowd_are_in_no_other_recording(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Inductor's caches at work, and without new choices of our own."""

    def ours_in_a_crowd(group: Group, _: torch.device, off: Without) -> dict[Way, float]:
        crowd = measure.copies_at_once() > 1
        return {way: 1.0 if (way == "library") != crowd else 2.0 for way in group.allowed(off)}

    monkeypatch.setattr(epilogue_ways, "times_us", ours_in_a_crowd)
    ours = OPERATORS["fused"] | OPERATORS["product"]
    module = Block().eval().to(device, torch.float16)
    x = torch.randn(2, 64, 28, 28, device=device, dtype=torch.float16)
    with using(Choices()):
        for kernels in ("epilogues", "crowded", "epilogues"):
            source = Source(
                kernels=kernels, layout="channels-last", without=frozenset({Kernel.POINTWISE, Kernel.SPLIT_K})
            )
            recording = record_source(Variants(module).use(source), source, {"x": x}, device)
            assert any(task.op in ours for task in recording.program.tasks) == (kernels == "crowded")
    forget_compiled()


class Attention(nn.Module):
    """Queries, keys and values read the same."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 64)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_layers_that_read_the_same_are_one_product(device: torch.device) -> None:
    """Merged, they are a candidate like others; three products become one, and the schedule is right."""
    torch.manual_seed(0)
    module = Attention().eval().to(device, torch.float16)
    x = torch.randn(2, 64, 256, device=device, dtype=torch.float16)
    built = build_best(module, {"x": x}, "test", BuildOptions(streams=1, fold=True, tolerance=1e-2), device)
    built.close()
    (row,) = (c for c in built.schedule.candidates if c.name == "inductor kernels and ours, merged products, 1 stream")
    assert row.replay_us is not None, row
    source = Source(kernels="epilogues", layout="given", merged=(("q", "k", "v"),))
    bound = Variants(module).use(source)
    recording = record_source(bound, source, {"x": x}, device)
    assert sum(task.op.startswith(("aten.addmm", "aten.mm")) for task in recording.program.tasks) == 2
    plan, _ = graph.make_plan(recording.program, max_streams=1)
    state = state_of(bound)
    instance = capture(
        recording.program, plan, state=state, constants=recording.constants, device=device, kernels=recording.kernels
    )
    for seed in range(3):
        check(instance, module, recording.program.inputs, device, tolerance=1e-2, seed=seed)
    instance.close()
    forget_compiled()
