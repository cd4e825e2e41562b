"""Our depthwise convolutions against torch's, on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.first_calls import without_cudnn
from nimble_jobs.engine.verify import check
from nimble_jobs.kernels import depthwise
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.keys.options import BuildOptions

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(
    ("images", "channels", "side", "kernel", "stride", "dilation"),
    [
        *((1, 44, 28, 5, 1, 1), (2, 11, 17, 3, 2, 1), (1, 88, 14, 7, 1, 1), (3, 36, 9, 3, 1, 2), (32, 64, 14, 3, 1, 1)),
        *((1, 96, 33, 7, 2, 1), (2, 22, 13, 5, 2, 2), (1, 1152, 7, 5, 1, 1), (2, 40, 3, 3, 1, 1)),
    ],
)
def test_a_convolution_agrees_with_torch(
    kind: str,
    channels_last: bool,
    images: int,
    channels: int,
    side: int,
    kernel: int,
    stride: int,
    dilation: int,
    device: torch.device,
) -> None:
    """In fp64 there is no question of how sums round."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    padding = dilation * (kernel - 1) // 2
    x = torch.randn(images, channels, side, side, device=device).to(dtype(kind)).contiguous(memory_format=form)
    weight = torch.randn(channels, 1, kernel, kernel, device=device).to(dtype(kind))
    exact = nn.functional.conv2d(x.double(), weight.double(), None, stride, padding, dilation, channels)
    shape = depthwise.Shape(
        dtype=kind,
        images=images,
        channels=channels,
        height=side,
        width=side,
        out_height=exact.shape[2],
        out_width=exact.shape[3],
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        channels_last=channels_last,
    )
    given = (x, weight, weight) if channels_last else (x, weight)
    for tile in shape.tiles:
        found = torch.full_like(exact, float("nan"), dtype=x.dtype, memory_format=form)
        depthwise.compiled(shape, tile, capability_of(device))(*given, found, *shape.sizes(tile))
        assert relative_norm(found, exact) < {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}[kind], tile


def test_a_schedule_uses_them_and_agrees_with_eager(device: torch.device) -> None:
    layers: list[nn.Module] = []
    for kernel in (3, 5, 3, 5):
        layers += [nn.Conv2d(32, 32, kernel, padding=kernel // 2, groups=32), nn.Conv2d(32, 32, 1), nn.ReLU()]
    module = nn.Sequential(*layers).eval().to(device, torch.float16)
    x = torch.randn(1, 32, 28, 28, device=device, dtype=torch.float16)
    built = build_best(module, {"x": x}, "test", BuildOptions(streams=1, tolerance=1e-2), device)
    try:
        assert built.failure is None
        names = [t.op for t in built.schedule.program.tasks if t.op.startswith(depthwise.PREFIX)]
        assert names, [t.op for t in built.schedule.program.tasks]
        inputs = built.schedule.program.inputs
        for eager in (module, without_cudnn(module, convolutions=True)):
            assert check(built.instances[0], eager, inputs, device, tolerance=1e-2, seed=7) < 1e-2
    finally:
        built.close()


def test_kernels_are_timed_without_their_launches(device: torch.device) -> None:
    small, large = torch.zeros(1, device=device), torch.zeros(1 << 28, device=device)
    times = measure.kernel_times_us([small.zero_, large.zero_], device)
    assert 0 < times[0] < times[1]
