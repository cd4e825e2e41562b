"""Our depthwise-separable convolution against fp64, its choice, and a schedule with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_jobs.bench.zoo.cells import DilatedSeparable, Separable
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.verify import check
from nimble_jobs.kernel_switches import NOTHING
from nimble_jobs.kernels import depthwise, separable, separable_pass
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.separable import OPERATOR, TILES, Shape, compiled, tensors_of
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.keys.options import BuildOptions

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated


def shape(kind: str, *, kernel: int, channels: int, features: int, stride: int, dilation: int, **more: object) -> Shape:
    padding = dilation * (kernel // 2)
    height, width = ((side - 1) // stride + 1 for side in (15, 14))
    depth = depthwise.Shape(
        dtype=kind,
        images=2,
        channels=channels,
        height=15,
        width=14,
        out_height=height,
        out_width=width,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        channels_last=True,
    )
    given = {"rectified": False, "depth_bias": False, "between": "", "added": False, "activation": ""} | more
    return Shape(depth=depth, features=features, **given)  # type: ignore[arg-type]


SHAPES = {
    "nasnet": {"kernel": 5, "channels": 44, "features": 44, "stride": 1, "dilation": 1, "rectified": True},
    "wide": {"kernel": 7, "channels": 176, "features": 176, "stride": 2, "dilation": 1, "rectified": True},
    "dilated": {"kernel": 3, "channels": 352, "features": 88, "stride": 1, "dilation": 2, "activation": "relu"},
    "mobilenet": {
        "kernel": 3,
        "channels": 576,
        "features": 96,
        "stride": 1,
        "dilation": 1,
        "depth_bias": True,
        "between": "relu6",
        "added": True,
    },
}


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_agrees_with_fp64(kind: str, tile: str, name: str, device: torch.device) -> None:
    """Also where the last blocks are not full. Nothing is left unwritten."""
    torch.manual_seed(0)
    one = shape(kind, **SHAPES[name])  # type: ignore[arg-type]
    depth = one.depth

    def random(*sizes: int, over: int = 1) -> torch.Tensor:
        made = (torch.randn(sizes, device=device) * over**-0.5).to(dtype(kind))
        return made.contiguous(memory_format=torch.channels_last) if len(sizes) == 4 and sizes[1] > 1 else made

    x = random(2, depth.channels, depth.height, depth.width)
    depth_weight = random(depth.channels, 1, depth.kernel, depth.kernel, over=depth.kernel**2)
    depth_bias = random(depth.channels) if one.depth_bias else None
    weight = random(one.features, depth.channels, over=depth.channels)[:, :, None, None]
    bias = random(one.features)
    other = random(2, one.features, depth.out_height, depth.out_width) if one.added else None
    given = (x, depth_weight, depth_bias, weight, bias, other)
    settings = (depth.stride, depth.padding, depth.dilation, one.rectified, one.between, one.activation, "")
    exact = OPERATOR(*(None if t is None else t.double() for t in given), *settings)
    out = torch.full_like(exact, float("nan"), dtype=x.dtype)
    compiled(one, tile, capability_of(device))(*tensors_of(*given), out, *one.sizes)
    assert relative_norm(out, exact) < {"float16": 2e-3, "bfloat16": 2e-2}[kind]


@pytest.mark.parametrize("name", SHAPES)
def test_tiles_are_measured(name: str, device: torch.device) -> None:
    """Two kernels and each tile have a time; the choice is one of them and stays."""
    one = shape("float16", **SHAPES[name])  # type: ignore[arg-type]
    with using(Choices()) as choices:
        chosen = separable_pass.fastest(one, device)
        assert separable_pass.fastest(one, device) == chosen
    (made,) = choices.made()
    assert {way for way, _ in made.times.times_us} == {"library", *one.tiles}, made.times.failed


def test_a_schedule_with_them_agrees_with_eager(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they are the fastest everywhere, all that could be one is one."""
    monkeypatch.setattr(separable_pass, "fastest", lambda one, _: one.tiles[0])
    torch.manual_seed(0)
    module = nn.Sequential(Separable(32, 64, 5, 2), DilatedSeparable(64, 64, 3, 1)).eval().to(device, torch.float16)
    x = torch.randn(1, 32, 28, 28, device=device, dtype=torch.float16)
    options = BuildOptions(streams=1, fold=True, tolerance=1e-2, without=NOTHING)
    built = build_best(module, {"x": x}, "test", options, device)
    try:
        assert built.failure is None
        names = [task.op for task in built.schedule.program.tasks if task.op.startswith(separable.PREFIX)]
        assert len(names) == 3, [task.op for task in built.schedule.program.tasks]
        inputs = built.schedule.program.inputs
        assert check(built.instances[0], module, inputs, device, tolerance=1e-2, seed=7) < 1e-2
    finally:
        built.close()
