"""Pointwise convolutions with activation or sum: where they are seen, and that operator and kernel compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.engine import measure
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.kernels import pointwise, pointwise_pass, ways
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.epilogue_ways import Group
from nimble_jobs.kernels.own_kernels import put_in_place
from nimble_jobs.kernels.pointwise import OPERATOR, Shape, launched, wanted_as_in
from tests.kernel_trials import interpreted, rewritten, timed_as

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def shape(*, pixels: int = 12, inputs: int = 16, features: int = 24, added: bool = False, then: str = "relu6") -> Shape:
    return Shape(dtype="bfloat16", pixels=pixels, inputs=inputs, features=features, added=added, activation=then)


class Seen(nn.Module):
    """One with each activation that libraries do not know, and sums in three forms."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, activation in zip(
            self.all, (nn.ReLU6(inplace=True), nn.SiLU(), nn.Hardswish(inplace=True)), strict=False
        ):
            x = activation(convolution(x))
        x = x + self.all[3](x.sigmoid())
        y = self.all[4](x.sigmoid())
        torch._C._log_api_usage_once("a call of no tensors, as in torchvision's stochastic depth")
        y += x
        return torch.add(self.all[5](y.sigmoid()), y)


class Unseen(nn.Module):
    """What is not quite one, or is better left to libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Conv2d(16, 16, 1, bias=False)
        self.wide = nn.Conv2d(16, 16, 3, padding=1)
        self.strided = nn.Conv2d(16, 16, 1, stride=2)
        self.plain, self.summed, self.twice, self.spread, self.written = (nn.Conv2d(16, 16, 1) for _ in range(5))
        self.turned, self.biased, self.odd = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 13, 1)
        self.left, self.right, self.method, self.inplace = (nn.Conv2d(16, 16, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.strided(functional.silu(self.wide(functional.silu(self.bare(x))))))
        x = functional.relu(self.plain(x))  # `epilogues` compares all ways for these
        x = functional.relu(x + self.summed(x))
        x = torch.relu_((x + self.method(x)).relu() + self.inplace(x))
        y = self.twice(x)
        x = functional.silu(y) + y.sigmoid()
        x = x + self.spread(x.mean((2, 3), keepdim=True))  # over all pixels
        x = self.left(x.sigmoid()) + self.right(x.tanh())  # these can run side by side
        before = x
        x += self.written(x.sigmoid())  # writes into what is read below
        y = functional.conv2d(x, self.turned.weight.transpose(0, 1), self.turned.bias)
        x = functional.conv2d(functional.silu(y), self.biased.weight, self.wide.weight[:, 0, 0, 0])
        x = functional.silu(x)
        return functional.silu(self.odd(x + before.sigmoid()))


class Changed(nn.Module):
    """What a convolution or a sum reads is written to in place, before the activation or after the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.all[0](x)
        x.mul_(2.0)
        y = functional.silu(y)  # seen: ours takes the convolution's place
        z = self.all[1](y)
        functional.relu6(y, inplace=True)
        z = z + x
        y = self.all[2](z)
        x[:, :8] += 1.0
        y = y + x
        z = self.all[3](y)
        x = functional.interpolate(x, scale_factor=1.0)
        return (z + y) * x  # seen: nothing in between writes


@pytest.mark.parametrize(("kind", "count"), [(Seen, 6), (Unseen, 0), (Changed, 2)])
def test_they_are_seen_and_compute_the_same(kind: type[nn.Module], count: int) -> None:
    """Each with its activation or sum; what is not quite one stays as it is."""
    torch.manual_seed(0)
    module = kind().eval().bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 6, 4).bfloat16().contiguous(memory_format=torch.channels_last)
    seen: list[Shape] = []

    def wanted(one: Shape, _: torch.device) -> str:
        seen.append(one)
        return one.tiles[0]

    def change(graph: torch.fx.Graph) -> None:
        assert pointwise_pass.rewrite(graph, CPU, lambda *_: None) == 0
        assert pointwise_pass.rewrite(graph, CPU, wanted) == count

    out = rewritten(module, x.clone(), change=change)
    with torch.no_grad():
        torch.testing.assert_close(out, module(x.clone()))
    then = [("relu6", False), ("silu", False), ("hardswish", False), ("", True), ("", True), ("", True)]
    then = [then[1], then[3]] if kind is Changed else then[:count]
    assert [(one.activation, one.added) for one in seen] == then
    assert all((one.pixels, one.inputs, one.features) == (48, 16, 16) for one in seen)


def test_shapes_that_are_worth_a_try() -> None:
    """Two tiles, those whose blocks fill a GPU best; none for odd channels and many pixels."""
    assert shape(pixels=12544, features=96).tiles == ("128x64x32", "64x32x32")
    assert shape(pixels=49, inputs=960, features=160, added=True, then="").tiles == ("16x32x64", "32x32x64")
    assert shape().grid("16x32x64") == (1, 1, 1)
    assert shape(added=True, then="silu").tiles
    for other in (shape(inputs=13), shape(features=21), shape(pixels=1 << 16)):
        assert not other.tiles
    assert shape(pixels=8, inputs=1 << 15, features=(1 << 16) - 8).tiles
    assert not shape(pixels=8, inputs=1 << 15, features=1 << 16).tiles, "32 bits cannot count its weights"
    assert not Shape(dtype="float32", pixels=8, inputs=8, features=8, added=False, activation="silu").tiles
    assert [shape(features=features).unit for features in (8, 12, 42)] == [8, 4, 2]


GROUP = Group(  # a convolution whose products are those of the next tests
    dtype=torch.bfloat16,
    x=(1, 336, 21, 21),
    weight=(336, 336, 1, 1),
    out=(1, 336, 21, 21),
    bias=True,
    stride=(1, 1),
    padding=(0, 0),
    dilation=(1, 1),
    groups=1,
    follows="relu",
)


def test_beside_copies_larger_tiles_are_tried() -> None:
    """Those whose blocks fill a share of a GPU. An earlier recording with one of them is recognised."""
    one = shape(pixels=441, inputs=336, features=336, then="")
    assert one.tiles == one.tiles_beside(1) == ("32x32x64", "16x32x64")
    assert one.tiles_beside(4) == ("64x64x64", "64x32x32", "128x64x32")
    assert shape(inputs=13).tiles_beside(4) == ()
    module = Operator(added=False, tile="64x64x64").eval().bfloat16()
    x = torch.randn(1, 16, 4, 3).bfloat16().contiguous(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(pointwise, "capability_of", lambda _: 90)
        ours = put_in_place(record(module, {"x": x}, state_of(module), CPU, module), GPU, launched)
    assert wanted_as_in(ours.program)(shape(features=16, then="silu"), GPU) == "64x64x64"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stride": (2, 2), "out": (1, 336, 11, 11)}, "121 pixels, stride 2, 336 to 336, then bias and relu"),
        ({"bias": False, "follows": "nothing"}, "441 pixels, 336 to 336"),
        ({"weight": (42, 336, 1, 1), "out": (1, 42, 21, 21)}, "441 pixels, 336 to 42, then bias and relu"),
        ({"padding": (1, 1)}, None),
        ({"stride": (2, 1)}, None),
        ({"groups": 2}, None),
        ({"weight": (336, 336, 3, 3)}, None),
        ({"follows": "add"}, None),
    ],
)
def test_convolutions_of_single_pixels_can_be_ours(change: dict[str, Any], words: str | None) -> None:
    """Also those that leave pixels out, and without a bias."""
    group = replace(GROUP, **change)
    assert bool(group.tiles) == (words is not None)
    if words is not None:
        assert group.pointwise.words == f"pointwise convolution, bfloat16, {words}"


def test_the_tiles_that_are_timed_are_those_for_so_many_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both where the pass measures a pair, and where the ways of a convolution are counted."""
    monkeypatch.setattr(pointwise_pass, "compiled", lambda *_: lambda *_: None)
    monkeypatch.setattr(pointwise_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(ways, "relative_norm", lambda *_: 0.0)
    timed_as(monkeypatch, [10.0, 9.0, 8.0, 7.0])
    one = shape(pixels=441, inputs=336, features=336, then="silu")
    with measure.crowded(4), using(Choices()) as choices:
        assert pointwise_pass.fastest(one, CPU) == "128x64x32"
        assert GROUP.tiles == one.tiles_beside(4)
    (made,) = choices.made()
    assert [way for way, _ in made.times.times_us] == ["library", *one.tiles_beside(4)]
    assert GROUP.tiles == one.tiles


class Operator(nn.Module):
    """The operator, as the pass leaves it."""

    def __init__(self, *, added: bool, tile: str = "16x32x64") -> None:
        super().__init__()
        self.layer, self.added, self.tile = nn.Conv2d(16, 16, 1), added, tile

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other, then = (x, "") if self.added else (None, "silu")
        return OPERATOR(x, self.layer.weight, self.layer.bias, other, then, self.tile)


class Strided(nn.Module):
    """The operator without a bias, over every second pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(16, 42, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATOR(x, self.layer.weight, None, None, "", "32x32x64", 2)


@pytest.mark.parametrize("added", [False, True])
def test_our_kernel_takes_the_operators_task(monkeypatch: pytest.MonkeyPatch, added: bool) -> None:
    """It can be stored, and writes what the operator wrote. Over contiguous pictures the operator stays."""
    module, x = Operator(added=added).eval().bfloat16(), torch.randn(1, 16, 4, 3).bfloat16()
    monkeypatch.setattr(pointwise, "capability_of", lambda _: 90)
    with torch.no_grad():
        contiguous = record(module, {"x": x}, state_of(module), CPU, module)
        last = {"x": x.contiguous(memory_format=torch.channels_last)}
        recording = record(module, last, state_of(module), CPU, module)
    assert put_in_place(recording, CPU, launched) is recording, "a CPU runs none"
    assert put_in_place(contiguous, GPU, launched).program == contiguous.program
    ours = put_in_place(recording, GPU, launched)
    (before,), (after,) = recording.program.tasks, ours.program.tasks
    one = shape(features=16, added=added, then="" if added else "silu")
    assert list(ours.kernels) == [after.op] == [one.name("16x32x64")]
    assert after.args == (*before.args[:3], before.args[0], before.outputs, 12, 2, 2, 0, 0)
    assert (after.reads, after.writes, after.mutates) == (before.reads, before.writes, before.writes)
    assert pack(ours.kernels) is not None
    assert wanted_as_in(ours.program)(one, GPU) == "16x32x64"
    assert wanted_as_in(recording.program)(one, GPU) is None


def test_our_kernel_leaves_pixels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Strided().eval().bfloat16()
    monkeypatch.setattr(pointwise, "capability_of", lambda _: 90)
    x = torch.randn(2, 16, 5, 3).bfloat16().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        ours = put_in_place(record(module, {"x": x}, state_of(module), CPU, module), GPU, launched)
    (task,) = ours.program.tasks
    assert task.op == "triton.pointwise.bfloat16.12x16x42x2x5x3.unbiased.32x32x64"
    image, weight, *stand_ins, out = task.args[:5]
    assert stand_ins == [weight, image]
    assert (task.writes, task.args[5:]) == ((out,), (12, 8, 21, 5, 3))


@pytest.mark.parametrize(
    ("times", "wrong", "tile"),
    [([10.0, 9.4, 9.45], None, 0), ([10.0, 9.6, 9.7], None, None), ([10.0, 6.0], 0, 1)],
)
@pytest.mark.parametrize("added", [False, True])
def test_the_fastest_tile_must_be_faster_and_agree(
    monkeypatch: pytest.MonkeyPatch, times: list[float], wrong: int | None, tile: int | None, added: bool
) -> None:
    """The choice is one that later builds find."""
    norms = iter(1.0 if i == wrong else 0.0 for i in range(2))
    monkeypatch.setattr(pointwise_pass, "compiled", lambda *_: lambda *_: None)
    monkeypatch.setattr(pointwise_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(ways, "relative_norm", lambda *_: next(norms))
    timed_as(monkeypatch, times)
    one = shape(added=added, then="" if added else "silu")
    with using(Choices()) as choices:
        assert pointwise_pass.fastest(one, CPU) == (None if tile is None else one.tiles[tile])
    (made,) = choices.made()
    then = "a sum" if added else "silu"
    assert made.times.task == f"pointwise convolution, bfloat16, 12 pixels, 16 to 24, then bias and {then}"


_INTERPRETED = """
import torch

from nimble_jobs.kernels import pointwise_triton
from nimble_jobs.kernels.pointwise import OPERATOR, TILES, Shape, constants

torch.manual_seed(0)
for number, activation in enumerate(("relu6", "silu", "hardswish", "", "relu")):
    tile = list(TILES)[number % len(TILES)]
    for added in (False, True):
        shape = Shape(dtype="float16", pixels=70, inputs=72, features=40, added=added, activation=activation)
        x, other = torch.randn(2, 72, 7, 5).half(), torch.randn(2, 40, 7, 5).half()
        x, other = (t.contiguous(memory_format=torch.channels_last) for t in (x, other))
        x[1, 3, 2, 1] = float("nan")
        weight, bias = torch.randn(40, 72, 1, 1).half() / 8, torch.randn(40).half()
        exact = (x.float(), weight.float(), bias.float(), other.float() if added else None)
        expected = OPERATOR(*exact, activation, "")
        out = torch.full_like(other, float("nan"))
        given = (x, weight, bias, other if added else x, out, *shape.sizes)
        pointwise_triton.pointwise[shape.grid(tile)](*given, **constants(shape, tile))
        torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3, equal_nan=True)
for stride, height, width in ((2, 7, 5), (2, 6, 8), (3, 7, 4)):
    x = torch.randn(2, 36, height, width).half().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(42, 36, 1, 1).half() / 6
    expected = OPERATOR(x.float(), weight.float(), None, None, "", "", stride)
    shape = Shape(dtype="float16", pixels=expected.numel() // 42, inputs=36, features=42, added=False, activation="",
                  biased=False, stride=stride, picture=(height, width))
    out = torch.full_like(expected, float("nan"), dtype=torch.float16)
    pointwise_triton.pointwise[shape.grid(tile)](x, weight, weight, x, out, *shape.sizes, **constants(shape, tile))
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
print("equal")
"""


def test_the_kernel_computes_what_the_operator_does() -> None:
    """By Triton's interpreter, which has to be asked for before Triton is imported."""
    interpreted(_INTERPRETED)
