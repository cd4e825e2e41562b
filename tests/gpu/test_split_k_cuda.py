"""Our sums in parts against fp64, and their choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import split_k_pass
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.epilogue_ways import Group, fastest
from nimble_jobs.kernels.split_k import compiled
from nimble_jobs.kernels.split_k_shape import Shape, parts_of, product_shape
from nimble_jobs.kernels.static_triton import capability_of


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("images", "channels", "side", "features", "kernel", "stride", "padding"),
    [
        (1, 256, 14, 256, (3, 3), (1, 1), (1, 1)),
        (1, 512, 14, 512, (3, 3), (2, 2), (1, 1)),
        (2, 128, 17, 136, (1, 7), (1, 1), (0, 3)),
        (1, 448, 8, 384, (3, 3), (1, 1), (1, 1)),
        (1, 128, 28, 128, (3, 3), (1, 1), (1, 1)),
        (1, 160, 17, 192, (7, 1), (1, 1), (3, 0)),
        (1, 48, 35, 64, (5, 5), (1, 1), (2, 2)),
        (1, 3, 224, 64, (7, 7), (2, 2), (3, 3)),
        (2, 3, 75, 32, (3, 3), (2, 2), (0, 0)),
    ],
)
def test_the_parts_of_a_convolution_add_up(
    kind: str,
    images: int,
    channels: int,
    side: int,
    features: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    device: torch.device,
) -> None:
    """In each way that is tried."""
    torch.manual_seed(0)
    x = torch.randn(images, channels, side, side, device=device).to(dtype(kind))
    weight = (torch.randn(features, channels, *kernel, device=device) * 0.02).to(dtype(kind))
    exact = functional.conv2d(x.double(), weight.double(), None, stride, padding)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    shape = Shape(
        dtype=kind,
        images=images,
        channels=channels,
        height=side,
        width=side,
        features=features,
        kernel=kernel,
        stride=stride,
        padding=padding,
    )
    assert shape.ways
    for way in shape.ways:
        parts = torch.full((parts_of(way), shape.pixels, features), float("nan"), device=device)
        for _ in range(20):  # a race would not show each time
            compiled(shape, way, capability_of(device))(x, weight, parts)
            out = parts.sum(0).view(images, *shape.out, features).permute(0, 3, 1, 2)
            assert relative_norm(out, exact) < 1e-5, way


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("images", "channels", "size", "features", "kernel", "stride", "padding", "dilation"),
    [
        (1, 2048, (65, 65), 256, (3, 3), (1, 1), (12, 12), (12, 12)),
        (1, 2048, (65, 65), 256, (3, 3), (1, 1), (24, 24), (24, 24)),
        (1, 2048, (65, 65), 256, (3, 3), (1, 1), (36, 36), (36, 36)),
        (1, 2048, (33, 33), 256, (3, 3), (1, 1), (36, 36), (36, 36)),  # only the middle of each window is inside
        (3, 512, (40, 61), 264, (3, 3), (1, 1), (24, 18), (24, 18)),
        (1, 256, (65, 65), 256, (3, 3), (1, 1), (2, 2), (2, 2)),
        (1, 512, (65, 65), 512, (3, 3), (1, 1), (4, 4), (4, 4)),
        (1, 64, (129, 97), 64, (3, 5), (1, 1), (20, 50), (20, 25)),
        (2, 128, (14, 13), 136, (3, 3), (2, 2), (3, 3), (3, 3)),
        (1, 48, (15, 15), 64, (3, 3), (1, 1), (6, 6), (6, 6)),
    ],
)
def test_the_parts_of_a_dilated_convolution_add_up(
    kind: str,
    images: int,
    channels: int,
    size: tuple[int, int],
    features: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    device: torch.device,
) -> None:
    """In each way that is tried."""
    torch.manual_seed(0)
    x = torch.randn(images, channels, *size, device=device).to(dtype(kind))
    weight = (torch.randn(features, channels, *kernel, device=device) * 0.02).to(dtype(kind))
    exact = functional.conv2d(x.double(), weight.double(), None, stride, padding, dilation)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    shape = Shape(
        dtype=kind,
        images=images,
        channels=channels,
        height=size[0],
        width=size[1],
        features=features,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    assert shape.ways
    for way in shape.ways:
        parts = torch.empty((parts_of(way), shape.pixels, features), device=device)
        for _ in range(20):  # a race would not show each time
            parts.fill_(float("nan"))
            compiled(shape, way, capability_of(device))(x, weight, parts)
            out = parts.sum(0).view(images, *shape.out, features).permute(0, 3, 1, 2)
            assert relative_norm(out, exact) < 1e-4, way  # sums are up to twelve times as long as above


@pytest.mark.parametrize("rows", [1, 128, 197])
def test_the_parts_of_a_product_add_up(rows: int, device: torch.device) -> None:
    """In each way that is tried."""
    torch.manual_seed(0)
    x = torch.randn(rows, 3072, device=device).half()
    weight = (torch.randn(768, 3072, device=device) * 0.02).half()
    shape = product_shape("float16", tuple(x.shape), tuple(weight.shape))
    for way in shape.ways:
        parts = torch.full((parts_of(way), rows, 768), float("nan"), device=device)
        compiled(shape, way, capability_of(device))(x, weight, parts)
        assert relative_norm(parts.sum(0), x.double() @ weight.double().t()) < 1e-5, way


def test_ways_are_measured(device: torch.device) -> None:
    """The library and each way have a time, for convolutions and a product; the choice is one of them."""
    group = Group(
        dtype=torch.float16,
        x=(1, 256, 14, 14),
        weight=(256, 256, 3, 3),
        out=(1, 256, 14, 14),
        bias=True,
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        groups=1,
        follows="relu",
    )
    dilated = replace(group, x=(1, 256, 65, 65), out=(1, 256, 65, 65), padding=(36, 36), dilation=(36, 36))
    assert len(dilated.split.ways) == 3
    shape = product_shape("float16", (197, 3072), (768, 3072))
    with using(Choices()) as choices:
        assert fastest(group, device) in group.ways
        assert fastest(dilated, device) in dilated.ways
        assert split_k_pass.fastest(shape, device) in ("library", *shape.ways)
    convolution, spread, product = choices.made()
    assert {way for way, _ in convolution.times.times_us} == set(group.ways)
    assert {way for way, _ in spread.times.times_us} == set(dilated.ways)
    assert {way for way, _ in product.times.times_us} == {"library", *shape.ways}
