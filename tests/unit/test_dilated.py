"""Dilated convolutions in our own kernel: their bands and tiles, the graphs that get it, and that it computes the
same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.kernels import bands, epilogues, split_k
from nimble_jobs.kernels.bands import Axis
from nimble_jobs.kernels.epilogue_ways import Group
from nimble_jobs.kernels.epilogues import choose_ways
from nimble_jobs.kernels.own_kernels import put_in_place
from nimble_jobs.kernels.split_k import CONVOLUTION, compiled, launched, shape_of
from nimble_jobs.kernels.split_k_shape import Shape, constants, parts_of
from tests.kernel_trials import interpreted

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHARED_BYTES = 227 << 10  # that a block of an H100 or H200 can have


def spread(dilation: int, channels: int = 2048, features: int = 256, side: int = 65) -> Shape:
    """A convolution as DeepLabv3's head has three, padded so that the picture keeps its size."""
    both = (dilation, dilation)
    return Shape(
        dtype="float16",
        images=1,
        channels=channels,
        height=side,
        width=side,
        features=features,
        kernel=(3, 3),
        padding=both,
        dilation=both,
    )


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    """One direction of any convolution that has a result."""
    size, kernel, stride, padding, dilation = (
        draw(st.integers(low, high)) for low, high in ((1, 24), (1, 5), (1, 3), (0, 30), (1, 30))
    )
    padding = max(padding, -(-(dilation * (kernel - 1) + 1 - size) // 2))
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return Axis(size=size, out=out, kernel=kernel, stride=stride, padding=padding, dilation=dilation)


def inside(axis: Axis, at: int) -> set[int]:
    """The positions of one window that are inside of the picture."""
    first = at * axis.stride - axis.padding
    return {tap for tap in range(axis.kernel) if 0 <= first + tap * axis.dilation < axis.size}


@given(axes(), st.data())
def test_all_that_is_inside_is_read(axis: Axis, data: st.DataObject) -> None:
    """And nothing beside it, for one window: only gaps between two windows' pixels can be read in vain."""
    first, last = sorted(data.draw(st.integers(0, axis.out - 1)) for _ in range(2))
    needed = set().union(*(inside(axis, at) for at in range(first, last + 1)))
    taps = set(axis.taps(first, last))
    assert needed <= taps
    if axis.stride <= axis.size:
        assert not needed or taps == set(range(min(needed), max(needed) + 1))
    assert set(axis.taps(first, first)) == inside(axis, first)


@given(axes())
def test_bands_are_all_columns(axis: Axis) -> None:
    """Each once, in at most three bands, those of the most taps first."""
    divided = bands.bands(axis)
    assert sorted(x for first, width in divided for x in range(first, first + width)) == list(range(axis.out))
    assert len(divided) <= bands.MOST_BANDS
    taps = [len(axis.taps(first, first + width - 1)) for first, width in divided]
    assert taps == sorted(taps, reverse=True)


@given(st.integers(1, 3), axes(), axes(), st.sampled_from([16, 64, 128]))
def test_tiles_read_what_their_windows_have_inside(images: int, rows: Axis, columns: Axis, pixels: int) -> None:
    """Each result is in one tile, in the order of the kernel; the bands chosen read no more than whole lines."""
    divided = bands.best(images, rows, columns, pixels)
    numbers = iter(bands.tiles(images, rows, columns, divided, pixels))
    for first, width in divided:
        places = [(row, first + x) for _ in range(images) for row in range(rows.out) for x in range(width)]
        for start in range(0, len(places), pixels):
            tile = places[start : start + pixels]
            needed = {(y, x) for row, column in tile for y in inside(rows, row) for x in inside(columns, column)}
            assert len(needed) <= next(numbers)
    assert next(numbers, None) is None
    whole = bands.tiles(images, rows, columns, [(0, columns.out)], pixels)
    assert sum(bands.tiles(images, rows, columns, divided, pixels)) <= sum(whole)


@pytest.mark.parametrize(
    ("dilation", "divided", "share"),
    [
        (12, ((12, 41), (0, 12), (53, 12)), 0.81),
        (24, ((24, 17), (0, 24), (41, 24)), 0.62),
        (36, ((0, 29), (36, 29), (29, 7)), 0.42),
    ],
)
def test_what_the_head_of_deeplab_reads(dilation: int, divided: tuple[bands.Band, ...], share: float) -> None:
    """With the tile of 128 pixels, of all pixels of the windows; the ways that are tried fill the device."""
    shape = spread(dilation)
    assert shape.out == (65, 65)
    assert shape.columns("128x128x64") == divided
    read = sum(bands.tiles(1, *shape.axes, divided, 128)) * 128
    assert read / (9 * 65 * 65) == pytest.approx(share, abs=0.005)
    assert shape.ways == ("128x256x64/4", "128x128x64/3", "128x128x64/4")


def test_which_dilated_shapes_have_ways() -> None:
    """Small pictures have that of other convolutions; large ones larger tiles, if they leave enough out or fill no
    device; none have whole rows.
    """
    assert spread(2, 256, 256, 14).ways == ("64x64x64/8",)
    assert spread(2, 512, 512).ways == ("128x256x64/2", "128x128x64/2")
    assert spread(2, 256, 64).ways == ("128x64x64/6", "128x64x64/8")
    assert spread(36, 256, 128).ways == ("128x128x64/6", "128x128x64/8", "128x64x64/3", "128x64x64/4")
    assert replace(spread(36), images=8).ways == ("128x256x64/1", "128x128x64/1")
    for shape in (
        replace(spread(2, 64, 64), images=16),  # fills the device, and nearly all pixels are inside
        spread(2, 3, 64),  # would read whole rows
        spread(12, 48),  # a large picture whose channels are no multiple of 64
        replace(spread(12), dtype="float32"),
        spread(12, features=9),
    ):
        assert not shape.ways
    undilated = replace(spread(1), padding=(1, 1))
    assert not undilated.ways
    assert not replace(undilated, kernel=(1, 1), dilation=(2, 2)).dilated


def test_names_of_other_kernels_stay() -> None:
    """Stored schedules name them."""
    assert spread(12).name("128x128x64/4").endswith(".1x2048x65x65x256.3x3-1x1-12x12-12x12.128x128x64-4")
    assert replace(spread(1), padding=(1, 1)).name("64x64x64/2").endswith(".3x3-1x1-1x1.64x64x64-2")


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_each_way_compiles(kind: str) -> None:
    """For an H100 or H200, within its shared memory."""
    shapes = (spread(36), replace(spread(2, 256, 256, 14), images=2), spread(2, 256, 64))
    for shape in (replace(each, dtype=kind) for each in shapes):
        for way in shape.ways:
            kernel = compiled(shape, way, 90)
            assert kernel.grid == (*shape.grid(way.partition("/")[0]), parts_of(way))
            assert kernel.shared_bytes <= SHARED_BYTES


class Net(nn.Module):
    """Both kinds, each with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 64, 3, padding=6, dilation=6)
        self.second = nn.Conv2d(64, 16, (3, 1), padding=(1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).relu()


def test_a_dilated_convolution_becomes_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then our kernel. Others have the arguments that stored programs know."""
    torch.manual_seed(0)
    seen: list[Group] = []
    monkeypatch.setattr(split_k, "capability_of", lambda _: 90)
    monkeypatch.setattr(epilogues, "fastest", lambda group, *_: seen.append(group) or group.ways[-1])
    module = Net().eval().bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(1, 64, 9, 7).bfloat16().contiguous(memory_format=torch.channels_last)
    names, weights = zip(*module.named_parameters(), strict=True)

    def call(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    with torch.no_grad():
        made = make_fx(call, tracing_mode="fake")(x, *weights)
        choose_ways(made.graph, CPU)
        made.recompile()
        torch.testing.assert_close(made(x, *weights), module(x), rtol=2e-2, atol=2e-2)
        found = [node.args[2:] for node in made.graph.find_nodes(op="call_function", target=CONVOLUTION)]
    shapes = [group.split for group in seen]
    assert [shape.dilated for shape in shapes] == [True, False]
    assert found == [
        ([1, 1], [6, 6], shapes[0].ways[0], [6, 6]),
        ([1, 1], [1, 0], shapes[1].ways[0]),
    ]

    class Rewritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(weights)

        def forward(self, x: torch.Tensor) -> Any:
            return made(x, *self.weights)

    rewritten = Rewritten().eval()
    with torch.no_grad():
        recording = record(rewritten, {"x": x}, state_of(rewritten), CPU, rewritten)
    tasks = [task for task in recording.program.tasks if task.op == str(CONVOLUTION)]
    assert [len(task.args) for task in tasks] == [6, 5]
    assert [shape_of(task) for task in tasks] == shapes
    ours = put_in_place(recording, GPU, launched)
    assert set(ours.kernels) == {shape.name(shape.ways[0]) for shape in shapes}
    assert pack(ours.kernels) is not None


def test_a_dilation_of_one_is_left_out() -> None:
    """The operator computes the same with and without it, as programs that were stored earlier call it."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 8, 9, 9), torch.randn(4, 8, 3, 3)
    without = CONVOLUTION(x, weight, [1, 1], [1, 1], "64x64x64/2")
    assert torch.equal(without, CONVOLUTION(x, weight, [1, 1], [1, 1], "64x64x64/2", [1, 1]))
    torch.testing.assert_close(without.sum(0), functional.conv2d(x, weight, None, 1, 1).permute(0, 2, 3, 1))
    wide = CONVOLUTION(x, weight, [1, 2], [2, 3], "64x64x64/2", [2, 3])
    expected = functional.conv2d(x, weight, None, (1, 2), (2, 3), (2, 3))
    torch.testing.assert_close(wide.sum(0), expected.permute(0, 2, 3, 1))


def test_constants_of_fewer_bands() -> None:
    """Those that there are not have no columns."""
    found = constants(spread(80), "128x128x64/4")  # only the middle of each window is inside
    assert [found[f"WIDTH_{number}"] for number in range(bands.MOST_BANDS)] == [65, 0, 0]


_INTERPRETED = """
import torch
from nimble_jobs.kernels import dilated_triton
from nimble_jobs.kernels.split_k_shape import Shape, constants

torch.manual_seed(0)


def compare(tile, parts, images, channels, size, features, kernel, stride, padding, dilation, middle=False):
    shape = Shape(
        dtype="float16", images=images, channels=channels, height=size[0], width=size[1], features=features,
        kernel=kernel, stride=stride, padding=padding, dilation=dilation,
    )
    assert shape.dilated
    x = torch.randn(images, channels, *size).half()
    weight = torch.randn(features, channels, *kernel).half() / 8
    expected = torch.nn.functional.conv2d(x.double(), weight.double(), None, stride, padding, dilation)
    if middle:  # nothing else may be read: it would make the result NaN
        only = torch.full_like(weight, float("nan"))
        only[:, :, kernel[0] // 2, kernel[1] // 2] = weight[:, :, kernel[0] // 2, kernel[1] // 2]
        weight = only
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    for count in parts:
        out = torch.full((count, shape.pixels, features), float("nan"))
        grid = (*shape.grid(tile), count)
        dilated_triton.dilated[grid](x, weight, out, **constants(shape, f"{tile}/{count}"))
        found = out.sum(0).view(images, *shape.out, features).permute(0, 3, 1, 2)
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


three, one = (3, 3), (1, 1)
compare("64x64x64", (1, 5), 1, 128, (9, 11), 24, three, one, (2, 2), (2, 2))
compare("64x64x16", (3,), 2, 48, (13, 10), 72, three, one, (8, 7), (8, 7))
compare("64x64x16", (1, 4), 2, 16, (5, 6), 8, three, one, (7, 7), (7, 7), middle=True)
compare("64x64x16", (18,), 1, 32, (17, 15), 16, (3, 5), (2, 1), (5, 12), (5, 3))
compare("64x64x32", (2,), 3, 32, (7, 19), 8, (1, 3), (1, 2), (0, 4), (1, 4))
compare("64x64x16", (2,), 1, 16, (12, 8), 8, (4, 2), (3, 2), (20, 9), (6, 5))
compare("64x64x16", (1,), 2, 16, (3, 4), 8, (2, 3), (3, 3), (30, 30), (9, 8))  # some windows are all padding
compare("128x64x64", (3,), 1, 64, (21, 19), 64, three, one, (12, 12), (12, 12))
compare("128x256x64", (2,), 1, 64, (15, 15), 264, three, one, (9, 9), (9, 9))
print("equal")
"""


def test_the_kernel_computes_what_torch_does() -> None:
    """By Triton's interpreter, which has to be asked for before Triton is imported; against fp64."""
    interpreted(_INTERPRETED)
