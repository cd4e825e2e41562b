"""Our pointwise convolution with activation or sum against fp64, and its choice."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import pointwise_pass
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.pointwise import TILES, Shape, compiled
from nimble_jobs.kernels.static_triton import capability_of


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("pixels", "inputs", "features", "added", "then"),
    [
        (12544, 16, 96, False, "relu6"),
        (3136, 144, 24, True, ""),
        (49, 960, 160, True, "silu"),
        (1, 8, 8, False, "hardswish"),
    ],
)
def test_the_kernel_agrees_with_fp64(
    kind: str, tile: str, pixels: int, inputs: int, features: int, added: bool, then: str, device: torch.device
) -> None:
    """Also where the last blocks are not full. Nothing is left unwritten."""
    torch.manual_seed(0)
    x, weight, bias, other = (
        torch.randn(*s, device=device) for s in ((pixels, inputs), (features, inputs), (features,), (pixels, features))
    )
    x, weight, bias, other = (t.to(dtype(kind)) for t in (x, weight * inputs**-0.5, bias, other))
    exact = functional.linear(x.double(), weight.double(), bias.double()) + (other.double() if added else 0.0)
    exact = ACTIVATIONS[then](exact) if then else exact
    shape = Shape(dtype=kind, pixels=pixels, inputs=inputs, features=features, added=added, activation=then)
    out = torch.full_like(exact, float("nan"), dtype=x.dtype)
    compiled(shape, tile, capability_of(device))(x, weight, bias, other if added else x, out, *shape.sizes)
    assert relative_norm(out, exact) < {"float16": 1e-3, "bfloat16": 1e-2}[kind]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("images", "height", "width", "inputs", "features", "stride"), [(1, 83, 83, 168, 84, 2), (3, 7, 10, 96, 42, 3)]
)
def test_pixels_are_left_out(
    tile: str, images: int, height: int, width: int, inputs: int, features: int, stride: int, device: torch.device
) -> None:
    """As NASNet does, without a bias. Values are read in fours and in twos."""
    torch.manual_seed(0)
    x = torch.randn(images, inputs, height, width, device=device).half().contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(features, inputs, 1, 1, device=device) * inputs**-0.5).half()
    exact = functional.conv2d(x.double(), weight.double(), None, stride)
    shape = Shape(
        dtype="float16",
        pixels=exact.numel() // features,
        inputs=inputs,
        features=features,
        added=False,
        activation="",
        biased=False,
        stride=stride,
        picture=(height, width),
    )
    out = torch.full_like(exact, float("nan"), dtype=x.dtype, memory_format=torch.channels_last)
    compiled(shape, tile, capability_of(device))(x, weight, weight, x, out, *shape.sizes)
    assert relative_norm(out, exact) < 1e-3


@pytest.mark.parametrize("then", ACTIVATIONS)
def test_nan_stays(then: str, device: torch.device) -> None:
    """In its pixel, and nowhere else."""
    x, weight, bias = (torch.randn(*s, device=device).half() for s in ((20, 16), (24, 16), (24,)))
    x[3, 5] = float("nan")
    shape = Shape(dtype="float16", pixels=20, inputs=16, features=24, added=False, activation=then)
    out = torch.zeros(20, 24, device=device).half()
    compiled(shape, "16x32x64", capability_of(device))(x, weight, bias, x, out, *shape.sizes)
    assert out.isnan().all(1).nonzero().tolist() == [[3]]
    assert out.isnan().any(1).sum() == 1


@pytest.mark.parametrize(("added", "then"), [(False, "silu"), (True, "")])
def test_tiles_are_measured(added: bool, then: str, device: torch.device) -> None:
    """The library and each tile have a time; the choice is one of them and stays."""
    shape = Shape(dtype="float16", pixels=784, inputs=192, features=32, added=added, activation=then)
    with using(Choices()) as choices:
        chosen = pointwise_pass.fastest(shape, device)
        assert pointwise_pass.fastest(shape, device) == chosen
    (made,) = choices.made()
    assert {way for way, _ in made.times.times_us} == {"library", *shape.tiles}
