"""Depthwise-separable convolutions: which are seen, that ours computes the same, and that it takes their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.bench.zoo.cells import DilatedSeparable, Separable
from nimble_jobs.engine import measure
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels import depthwise, pointwise_pass, separable, separable_pass, ways
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.own_kernels import put_in_place
from nimble_jobs.kernels.separable import OPERATOR, Shape, launched, wanted_as_in
from nimble_jobs.planner.sources.fold import folded
from tests.kernel_trials import interpreted, rewritten, timed_as

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

DEPTH = depthwise.Shape(
    dtype="bfloat16",
    images=2,
    channels=16,
    height=6,
    width=4,
    out_height=6,
    out_width=4,
    kernel=3,
    stride=1,
    padding=1,
    dilation=1,
    channels_last=True,
)
ONE = Shape(depth=DEPTH, features=24, rectified=True, depth_bias=False, between="", added=False, activation="")


class Seen(nn.Module):
    """Each with other neighbours: as in NASNet, as in MobileNetV2, with a ReLU that others read, with one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=i in (1, 2)) for i in range(6))
        self.products = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows, products = self.windows, self.products
        x = products[0](windows[0](functional.relu(x)))
        x = products[1](functional.relu6(windows[1](x)))
        x = products[2](functional.silu(windows[2](x))) + x
        y = functional.relu(x - 0.5)
        x = products[3](windows[3](y)) * y
        x = functional.hardswish(products[4](windows[4](x)))
        return functional.relu(products[5](windows[5](x.relu())) + x)


class Unseen(nn.Module):
    """What is not quite one, or where something is read that is written to in between."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=i in (3, 4)) for i in range(9))
        self.products = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=i != 2) for i in range(9))
        self.wide = nn.Conv2d(16, 16, 3, padding=1)
        self.narrow = nn.Conv2d(16, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows, products = self.windows, self.products
        y = windows[0](x)
        x = products[0](y) + y.sigmoid()  # the window's result is read twice
        x = products[1](windows[1](x).sigmoid())  # no activation of ours
        x = products[2](windows[2](x))  # no bias
        x = products[3](windows[3](x))  # a bias between, and no activation
        y = functional.silu(windows[4](x))
        x = products[4](y) + y.sigmoid()  # what stands between is read twice
        x = products[5](self.wide(x))  # no depthwise convolution
        y = windows[6](x)
        x.mul_(2.0)
        x = products[6](y) + x
        y = windows[7](x)
        x[:, :8] += 1.0
        x = products[7](y) + x
        return self.narrow(windows[8](x))  # six features


class Apart(nn.Module):
    """What our kernel could not read as it lies, a product over a window of its own, and activations called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=i > 2) for i in range(4))
        self.products = nn.ModuleList(nn.Conv2d(8, 8, 3 if i == 0 else 1) for i in range(4))
        self.biases = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows, products = self.windows, self.products
        y = products[0](windows[0](x[:, :8] * 2.0))  # over nine pixels
        x = products[1](windows[1](functional.relu(x[:, 8:])))  # gaps before the ReLU, none after it
        between = functional.conv2d(x, windows[2].weight, self.biases[::2], padding=1, groups=8)
        x = products[2](functional.relu6(between))  # a bias with gaps
        x = products[3](functional.relu6(input=windows[3](functional.relu(input=x))))
        return x[:, :, 1:-1, 1:-1] + y


@pytest.mark.parametrize(("kind", "count"), [(Seen, 6), (Unseen, 0), (Apart, 1)])
def test_they_are_seen_and_compute_the_same(kind: type[nn.Module], count: int) -> None:
    """Each with its neighbours; what is not quite one stays as it is."""
    torch.manual_seed(0)
    module = kind().eval().bfloat16()  # weights of 3x3 are read as they lie only if contiguous
    if kind is not Apart:
        module = module.to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 6, 4).bfloat16().contiguous(memory_format=torch.channels_last)
    seen: list[Shape] = []

    def wanted(one: Shape, _: torch.device) -> str:
        seen.append(one)
        return one.tiles[0]

    def change(graph: torch.fx.Graph) -> None:
        assert separable_pass.rewrite(graph, CPU, lambda *_: None) == 0
        assert separable_pass.rewrite(graph, CPU, wanted) == count
        assert sum(node.target is OPERATOR for node in graph.nodes) == count

    out = rewritten(module, x.clone(), change=change)
    with torch.no_grad():
        torch.testing.assert_close(out, module(x.clone()))
    if kind is Seen:
        assert [(one.steps) for one in seen] == [
            ("relu", "window", "product"),
            ("window", "bias", "relu6", "product"),
            ("window", "bias", "silu", "product", "sum"),
            ("relu", "window", "product"),
            ("window", "product", "hardswish"),
            ("relu", "window", "product", "sum", "relu"),
        ]


def test_all_of_nasnets_are_seen() -> None:
    """Once their normalisations are folded: two of a separable block, whatever its stride, and a dilated one."""
    torch.manual_seed(0)
    module = nn.Sequential(Separable(16, 24, 5, 2), DilatedSeparable(24, 24, 3, 1)).eval()
    x = torch.randn(2, 16, 9, 8).contiguous(memory_format=torch.channels_last)
    pairs = [("0.2", "0.3"), ("0.6", "0.7"), ("1.2", "1.3")]
    module = folded(module, pairs).bfloat16().to(memory_format=torch.channels_last)
    x = x.bfloat16()
    seen: list[Shape] = []
    out = rewritten(
        module,
        x,
        change=lambda graph: separable_pass.rewrite(graph, CPU, lambda one, _: seen.append(one) or one.tiles[0]),
    )
    with torch.no_grad():
        torch.testing.assert_close(out, module(x))
    assert [(one.depth.channels, one.features, one.depth.stride, one.depth.dilation) for one in seen] == [
        (16, 24, 2, 1),
        (24, 24, 1, 1),
        (24, 24, 1, 2),
    ]


def test_shapes_that_are_worth_a_try() -> None:
    """Tiles that take all channels in few steps, and whose blocks fill a GPU; none for odd channels and many pixels."""
    assert ONE.tiles[0] == "16x32x64"
    wide = replace(ONE, depth=replace(DEPTH, channels=176, out_height=14, out_width=14), features=176)
    assert wide.tiles == ("16x64x128", "16x128x128", "16x64x64")
    assert (ONE.unit, wide.unit, replace(ONE, features=44).unit) == (8, 8, 4)
    for other in (
        replace(ONE, features=22),
        replace(ONE, features=1024),  # each window would be summed eight times
        replace(ONE, depth=replace(DEPTH, dtype="float32")),
        replace(ONE, depth=replace(DEPTH, channels_last=False)),
        replace(ONE, depth=replace(DEPTH, out_height=1 << 14)),
    ):
        assert not other.tiles


class Operator(nn.Module):
    """The operator, as the pass leaves it."""

    def __init__(self, one: Shape) -> None:
        super().__init__()
        self.one = one
        self.window = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=one.depth_bias)
        self.product = nn.Conv2d(16, 24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.one, torch.cat([x, x[:, :8]], 1) if self.one.added else None
        given = (self.window.weight, self.window.bias, self.product.weight, self.product.bias, other, 1, 1, 1)
        return OPERATOR(x, *given, one.rectified, one.between, one.activation, "16x32x64")


@pytest.mark.parametrize("one", [ONE, replace(ONE, rectified=False, depth_bias=True, between="relu6", added=True)])
def test_our_kernel_takes_the_operators_task(monkeypatch: pytest.MonkeyPatch, one: Shape) -> None:
    """It can be stored, and writes what the operator wrote. Over contiguous images the operator stays."""
    module, x = Operator(one).eval().bfloat16(), torch.randn(2, 16, 6, 4).bfloat16()
    monkeypatch.setattr(separable, "capability_of", lambda _: 90)
    with torch.no_grad():
        contiguous = record(module, {"x": x}, state_of(module), CPU, module)
        last = {"x": x.contiguous(memory_format=torch.channels_last)}
        recording = record(module, last, state_of(module), CPU, module)
    assert put_in_place(recording, CPU, launched) is recording, "a CPU runs none"
    assert put_in_place(contiguous, GPU, launched).program == contiguous.program
    ours = put_in_place(recording, GPU, launched)
    before, after = recording.program.tasks[-1], ours.program.tasks[-1]
    assert list(ours.kernels) == [after.op] == [one.name("16x32x64")]
    x_view, depth_weight, depth_bias, weight, bias, other, *_ = before.args
    stand_ins = (bias if depth_bias is None else depth_bias, weight, bias, x_view if other is None else other)
    assert after.args == (x_view, depth_weight, *stand_ins, before.outputs, *one.sizes)
    assert (after.reads, after.writes, after.mutates) == (before.reads, before.writes, before.writes)
    assert pack(ours.kernels) is not None
    assert wanted_as_in(ours.program)(one, GPU) == "16x32x64"
    assert wanted_as_in(recording.program)(one, GPU) is None


@pytest.mark.parametrize(
    ("times", "wrong", "tile"),
    [
        ([10.0, 12.0, 9.4, 9.45, 9.48], None, 0),
        ([10.0, 9.0, 9.4, 9.45, 9.48], None, None),  # the second pair is faster
        ([10.0, 12.0, 9.0, 9.1], 0, 1),
    ],
)
@pytest.mark.parametrize("one", [ONE, replace(ONE, depth_bias=True, between="silu", added=True, activation="")])
def test_the_fastest_tile_must_be_faster_than_two_kernels(
    monkeypatch: pytest.MonkeyPatch, times: list[float], wrong: int | None, tile: int | None, one: Shape
) -> None:
    """The choice is one that later builds find. There is a pair with the library's product and one with our own.

    The window's kernel without bias does not compile.
    """
    norms = iter(1.0 if i == wrong else 0.0 for i in range(len(one.tiles)))
    monkeypatch.setattr(separable_pass, "compiled", lambda *_: lambda *_: None)
    monkeypatch.setattr(separable_pass.depthwise, "compiled", _compiles_with_bias)
    monkeypatch.setattr(separable_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(ways, "relative_norm", lambda *_: next(norms))
    monkeypatch.setattr(pointwise_pass, "ways_of", lambda *_: _OneWay())
    timed_as(monkeypatch, times)
    with using(Choices()) as choices:
        assert separable_pass.fastest(one, CPU) == (None if tile is None else one.tiles[tile])
    (made,) = choices.made()
    assert dict(made.times.times_us)["library"] == min(times[:2])
    assert made.times.task.endswith(f", then a product to 24 features: {', '.join(one.steps)}")


def test_each_tile_of_the_window_is_timed_with_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(ONE, depth=replace(DEPTH, width=8, out_width=8), depth_bias=True, between="silu")
    ran: list[str] = []
    monkeypatch.setattr(separable_pass, "compiled", lambda *_: lambda *_: None)
    monkeypatch.setattr(separable_pass.depthwise, "compiled", lambda _, tile, *__: lambda *_: ran.append(tile))
    monkeypatch.setattr(separable_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(ways, "relative_norm", lambda *_: 1.0)
    monkeypatch.setattr(pointwise_pass, "ways_of", lambda *_: _OneWay())
    timed_as(monkeypatch, [10.0, 9.0, 8.0, 9.0])
    with using(Choices()) as choices:
        assert separable_pass.fastest(wide, CPU) is None
    assert ran == ["4x4x16", "4x4x16", "8x8x32", "8x8x32"]
    (made,) = choices.made()
    assert made.times.times_us == (("library", 8.0),)


class _OneWay:
    calls = {"16x32x64": lambda: None}  # noqa: RUF012


def _compiles_with_bias(*given: object) -> Callable[..., None]:
    if given[-1] is None:
        raise EngineError("does not compile")
    return lambda *_: None


_INTERPRETED = """
from dataclasses import replace

import torch

from nimble_jobs.kernels import depthwise, separable_triton
from nimble_jobs.kernels.separable import OPERATOR, TILES, Shape, constants

torch.manual_seed(0)
CASES = (  # tile, window, stride, padding, dilation, ReLU before, between, sum, after
    ("16x32x64", 3, 1, 1, 1, True, "", False, ""),
    ("16x64x64", 3, 2, 1, 1, False, "relu6", True, ""),
    ("32x64x64", 5, 1, 2, 1, True, "", False, "relu"),
    ("16x32x128", 3, 1, 2, 2, False, "silu", False, "silu"),
    ("16x64x128", 3, 2, 0, 1, True, "hardswish", True, "relu"),
    ("16x128x128", 1, 1, 0, 1, False, "", False, "hardswish"),
)
assert {case[0] for case in CASES} == set(TILES)
for tile, kernel, stride, padding, dilation, rectified, between, added, activation in CASES:
    x = torch.randn(2, 68, 5, 4).half().contiguous(memory_format=torch.channels_last)
    x[1, 3, 2, 1] = float("nan")
    depth_weight = torch.randn(68, 1, kernel, kernel).half() / kernel
    depth_bias = torch.randn(68).half() if between else None
    weight, bias = torch.randn(40, 68, 1, 1).half() / 8, torch.randn(40).half()
    settings = (stride, padding, dilation, rectified, between, activation, "")
    shaped = OPERATOR(x, depth_weight, depth_bias, weight, bias, None, *settings)
    other = torch.randn(*shaped.shape).half().contiguous(memory_format=torch.channels_last) if added else None
    exact = [None if t is None else t.double() for t in (x, depth_weight, depth_bias, weight, bias, other)]
    expected = OPERATOR(*exact, *settings)
    depth = depthwise.Shape(
        dtype="float16", images=2, channels=68, height=5, width=4, out_height=shaped.shape[2],
        out_width=shaped.shape[3], kernel=kernel, stride=stride, padding=padding, dilation=dilation, channels_last=True,
    )
    shape = Shape(
        depth=depth, features=40, rectified=rectified, depth_bias=bool(between), between=between, added=added,
        activation=activation,
    )
    out = torch.full_like(shaped, float("nan"))
    given = (x, depth_weight, bias if depth_bias is None else depth_bias, weight, bias, x if other is None else other)
    separable_triton.separable[shape.grid(tile)](*given, out, *shape.sizes, **constants(shape, tile))
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3, equal_nan=True)
print("equal")
"""


def test_the_kernel_computes_what_the_operator_does() -> None:
    """By Triton's interpreter, which has to be asked for before Triton is imported."""
    interpreted(_INTERPRETED)


def test_every_activation_has_a_number() -> None:
    """The kernel takes them by number, and none as -1."""
    found = [
        separable.constants(replace(ONE, activation=name), "16x32x64")["ACTIVATION"] for name in ("", *ACTIVATIONS)
    ]
    assert found == [-1, *range(len(ACTIVATIONS))]


def test_what_ours_is_compared_with_comes_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for each shape of a depthwise convolution, in up to 0.7 s. What is timed is cuDNN's."""
    on: list[bool] = []
    real = functional.conv2d

    def conv2d(*args: Any) -> torch.Tensor:
        on.append(torch.backends.cudnn.enabled)
        return real(*args)

    def uncompiled(*_: Any) -> Any:
        raise EngineError("no Triton")

    monkeypatch.setattr(functional, "conv2d", conv2d)
    for module in (separable_pass, depthwise):
        monkeypatch.setattr(module, "compiled", uncompiled)
    monkeypatch.setattr(separable_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(pointwise_pass, "ways_of", lambda *_: ways.Ways("bfloat16"))
    monkeypatch.setattr(measure, "kernel_times_us", lambda calls, _: [1.0 for call in calls if not call()])
    assert separable_pass._times(ONE, CPU).chosen == "library"
    assert on == [False] * 3 + [True]
