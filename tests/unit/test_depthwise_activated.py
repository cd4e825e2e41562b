"""Depthwise convolutions with bias and activation: where they are seen, and that our kernel computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.kernels import depthwise_activated, depthwise_pass
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.depthwise import Shape
from nimble_jobs.kernels.depthwise_activated import OPERATOR, Activated, launched, wanted_as_in
from nimble_jobs.kernels.depthwise_pass import fastest
from nimble_jobs.kernels.own_kernels import put_in_place
from tests.kernel_trials import interpreted, rewritten, timed_as

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Net(nn.Module):
    """Depthwise convolutions with each activation, and four that are not to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Conv2d(8, 8, 3, stride=1 + i % 2, padding=1, groups=8) for i in range(4))
        self.grouped = nn.Conv2d(8, 8, 3, groups=4)
        self.bare = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.uneven = nn.Conv2d(8, 8, 3, groups=8, padding=(0, 1))
        self.twice = nn.Conv2d(8, 8, 1, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activations = (nn.ReLU(inplace=True), nn.ReLU6(), nn.SiLU(inplace=True), nn.Hardswish())
        for convolution, activation in zip(self.all, activations, strict=True):
            y = convolution(x)
            x.mul_(2.0)  # ours must not read it later
            x = activation(y)
        x = functional.relu(self.uneven(functional.relu(self.bare(functional.relu(self.grouped(x))))))
        y = self.twice(x)
        return functional.relu(y) + functional.gelu(y)


def test_they_are_seen_and_compute_the_same() -> None:
    """Each with its activation, strides and padding. What is not quite one stays as it is."""
    torch.manual_seed(0)
    module = Net().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 44, 40).contiguous(memory_format=torch.channels_last)
    seen: list[Activated] = []

    def change(graph: torch.fx.Graph) -> None:
        assert depthwise_pass.rewrite(graph, CPU, lambda *_: None) == 0
        assert depthwise_pass.rewrite(graph, CPU, lambda one, _: seen.append(one) or one.tiles[0]) == 4  # type: ignore[func-returns-value]

    out = rewritten(module, x.clone(), change=change)
    with torch.no_grad():
        torch.testing.assert_close(out, module(x.clone()))
    assert [one.activation for one in seen] == list(ACTIVATIONS)
    assert [(one.shape.stride, one.shape.padding, one.shape.out_height) for one in seen[:2]] == [(1, 1, 44), (2, 1, 22)]


class Operator(nn.Module):
    """The operator, as the pass leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(12, 12, 3, groups=12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATOR(x, self.conv.weight, self.conv.bias, 2, 1, 1, "silu", "4x4x16")


def test_our_kernel_takes_the_operators_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be stored, and writes what the operator wrote. Over contiguous images the operator stays."""
    module = Operator().eval()
    monkeypatch.setattr(depthwise_activated, "capability_of", lambda _: 90)
    for channels_last in (True, False):
        x = torch.randn(1, 12, 9, 9)
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        with torch.no_grad():
            recording = record(module, {"x": x}, state_of(module), CPU, module)
        assert put_in_place(recording, CPU, launched) is recording, "a CPU runs none"
        (before,), (after,) = recording.program.tasks, put_in_place(recording, GPU, launched).program.tasks
        if not channels_last:
            assert after == before
            continue
        ours = put_in_place(recording, GPU, launched)
        assert list(ours.kernels) == [after.op] == ["triton.depthwise3.float32.last.12x9x9x5x5x25x2x1x1.4x4x16.silu"]
        assert after.args[:4] == (*before.args[:3], before.outputs)
        assert (after.reads, after.writes, after.mutates) == (before.reads, before.writes, before.writes)
        assert pack(ours.kernels) is not None
        one = depthwise_activated.activated_of(before)
        assert one is not None
        assert wanted_as_in(ours.program)(one, GPU) == "4x4x16"
        assert wanted_as_in(recording.program)(one, GPU) is None


ONE = Activated(
    shape=Shape(
        dtype="float32",
        images=1,
        channels=8,
        height=6,
        width=6,
        out_height=6,
        out_width=6,
        kernel=3,
        stride=1,
        padding=1,
        dilation=1,
        channels_last=True,
    ),
    activation="relu6",
)


@pytest.mark.parametrize(
    ("ours_us", "wrong", "chosen"),
    [
        ((9.6, 9.4), (), "8x8x32"),
        ((9.4, 9.3), ("8x8x32",), "4x4x16"),
        ((9.6, 9.6), (), None),
        ((1.0, 1.0), ("4x4x16", "8x8x32"), None),
    ],
)
def test_ours_must_be_faster_and_agree(
    monkeypatch: pytest.MonkeyPatch, ours_us: tuple[float, float], wrong: tuple[str, ...], chosen: str | None
) -> None:
    """The choice is one that later builds find."""

    def compiled(one: Activated, tile: str, _: int) -> Callable[..., None]:
        def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, *sizes: int) -> None:
            assert sizes == one.shape.sizes(tile)
            out.copy_(OPERATOR(x, weight, bias, 1, 1, 1, one.activation, tile) + (tile in wrong))

        return kernel

    monkeypatch.setattr(depthwise_pass, "compiled", compiled)
    monkeypatch.setattr(depthwise_pass, "capability_of", lambda _: 90)
    timed_as(monkeypatch, [10.0, *(us for us, tile in zip(ours_us, ONE.tiles, strict=True) if tile not in wrong)])
    with using(Choices()) as choices:
        assert fastest(ONE, CPU) == chosen
    (made,) = choices.made()
    assert made.times.task.endswith("channels-last, 1x8x6x6 to 6x6, then bias and relu6")
    assert [way for way, _ in made.times.failed] == list(wrong)


_INTERPRETED = """
import torch
from nimble_jobs.kernels import depthwise_triton
from nimble_jobs.kernels.depthwise import Shape, constants
from nimble_jobs.kernels.activations import ACTIVATIONS
from nimble_jobs.kernels.depthwise_activated import OPERATOR

torch.manual_seed(0)
for number, activation in enumerate(ACTIVATIONS):
    stride = 1 + number % 2
    shape = Shape(dtype="float16", images=2, channels=20, height=7, width=5, out_height=6 // stride + 1,
                  out_width=4 // stride + 1, kernel=3, stride=stride, padding=1, dilation=1, channels_last=True)
    x = torch.randn(2, 20, 7, 5).half().contiguous(memory_format=torch.channels_last)
    x[1, 3, 2, 1] = float("nan")
    weight, bias = torch.randn(20, 1, 3, 3).half(), torch.randn(20).half()
    expected = OPERATOR(x.float(), weight.float(), bias.float(), stride, 1, 1, activation, "")
    for tile in ("4x4x16", "8x8x32"):
        out = torch.full_like(expected, float("nan"), dtype=torch.float16)
        given = (x, weight, bias, out, *shape.sizes(tile))
        depthwise_triton.depthwise_channels_last[shape.grid(tile)](*given, **constants(shape, tile, activation))
        torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3, equal_nan=True)
print("equal")
"""


def test_the_kernel_computes_what_the_operator_does() -> None:
    """By Triton's interpreter, which has to be asked for before Triton is imported."""
    interpreted(_INTERPRETED)
