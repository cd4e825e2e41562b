"""Our depthwise convolutions with bias and activation, against fp64 and in a whole schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine.capture import capture
from nimble_jobs.engine.contents import state_of
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.verify import check
from nimble_jobs.kernel_switches import Kernel
from nimble_jobs.kernels import depthwise_pass
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.depthwise import PREFIX, Shape
from nimble_jobs.kernels.depthwise_activated import Activated, compiled
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.planner.sources.source import Source, Variants, record_source

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("images", "channels", "side", "kernel", "stride"), [(1, 144, 56, 3, 1), (3, 22, 17, 5, 2)])
def test_the_kernel_agrees_with_fp64(
    kind: str, activation: str, images: int, channels: int, side: int, kernel: int, stride: int, device: torch.device
) -> None:
    """In fp64 there is no question of how sums round."""
    x = torch.randn(images, channels, side, side, device=device).to(dtype(kind))
    x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (
        torch.randn(*s, device=device).to(dtype(kind)) for s in ((channels, 1, kernel, kernel), (channels,))
    )
    settings = (stride, kernel // 2, 1)
    sums = nn.functional.conv2d(x.double(), weight.double(), bias.double(), *settings, channels)
    exact = ACTIVATIONS[activation](sums)
    shape = Shape(
        dtype=kind,
        images=images,
        channels=channels,
        height=side,
        width=side,
        out_height=exact.shape[2],
        out_width=exact.shape[3],
        kernel=kernel,
        stride=stride,
        padding=kernel // 2,
        dilation=1,
        channels_last=True,
    )
    one = Activated(shape=shape, activation=activation)
    for tile in one.tiles:
        found = torch.full_like(exact, float("nan"), dtype=x.dtype, memory_format=torch.channels_last)
        compiled(one, tile, capability_of(device))(x, weight, bias, found, *shape.sizes(tile))
        assert relative_norm(found, exact) < {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}[kind], tile


class Block(nn.Module):
    """A part of MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 96, 1), nn.ReLU6(), nn.Conv2d(96, 96, 3, padding=1, groups=96), nn.ReLU6(), nn.Conv2d(96, 8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def test_a_schedule_with_one_agrees_with_eager(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two streams, on a captured replay over fresh inputs."""
    monkeypatch.setattr(depthwise_pass, "fastest", lambda one, _: one.tiles[-1])
    torch.manual_seed(0)
    module = Block().eval().to(device, torch.float16)
    others = frozenset({Kernel.SEPARABLE})  # it may take the convolution together with the next one
    source = Source(kernels="epilogues", layout="channels-last", without=others)
    bound = Variants(module).use(source)
    x = torch.randn(2, 8, 28, 28, device=device, dtype=torch.float16)
    with torch._inductor.config.patch(force_disable_caches=True):
        recording = record_source(bound, source, {"x": x}, device)
    assert sum(t.op.startswith(PREFIX) and t.op.endswith(".relu6") for t in recording.program.tasks) == 1
    plan, _ = graph.make_plan(recording.program, max_streams=2)
    instance = capture(
        recording.program,
        plan,
        state=state_of(bound),
        constants=recording.constants,
        device=device,
        kernels=recording.kernels,
    )
    for seed in range(3):
        check(instance, module, recording.program.inputs, device, tolerance=1e-2, seed=seed)
    instance.close()
