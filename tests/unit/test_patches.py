"""Convolutions over patches as products: where they are seen, and that both compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.engine import measure
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.kernels import patches_pass
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.patches_pass import Shape, as_product, wanted_as_in
from tests.kernel_trials import rewritten

CPU = torch.device("cpu")
SHAPE = Shape(
    dtype="float32",
    images=2,
    channels=3,
    height=8,
    width=12,
    features=5,
    patch=(4, 2),
    bias=True,
    channels_last=False,
    out_channels_last=False,
)
# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Net(nn.Module):
    """One convolution over patches, and others that only look like it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 5, (4, 2), (4, 2))
        self.overlapping = nn.Conv2d(3, 5, (4, 2), (2, 2))
        self.padded = nn.Conv2d(3, 5, (4, 2), (4, 2), padding=(0, 1))
        self.cut_off = nn.Conv2d(3, 5, 5, 5)
        self.grouped = nn.Conv2d(3, 6, 4, 4, groups=3)
        self.spread = nn.Conv2d(3, 5, 2, 2, dilation=2)
        self.point = nn.Conv2d(3, 5, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        patches = self.patches(x)
        others = (self.overlapping, self.padded, self.cut_off, self.grouped, self.spread, self.point)
        return [patches.view(2, -1) if patches.is_contiguous() else patches, *(other(x) for other in others)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("input_last", [False, True])
def test_they_are_seen_and_compute_the_same(channels_last: bool, input_last: bool) -> None:
    """In both memory formats of weight and input; only windows side by side over the whole picture are patches. The
    result lies as the convolution's does.
    """
    torch.manual_seed(0)
    layout, of_input = (
        torch.channels_last if each else torch.contiguous_format for each in (channels_last, input_last)
    )
    module, x = Net().eval().to(memory_format=layout), torch.randn(2, 3, 8, 12).contiguous(memory_format=of_input)
    seen: list[Shape] = []

    def wanted(shape: Shape, _: torch.device) -> bool:
        seen.append(shape)
        return True

    def change(graph: torch.fx.Graph) -> None:
        assert patches_pass.rewrite(graph, CPU, lambda *_: False) == 0
        assert patches_pass.rewrite(graph, CPU, wanted) == 1

    out = rewritten(module, x, change=change)
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(out, expected)
    assert [each.stride() for each in out] == [each.stride() for each in expected]
    assert [(shape.weight, shape.patch, shape.channels_last) for shape in seen] == [
        ((5, 3, 4, 2), (4, 2), channels_last)
    ]


def test_a_later_recording_does_as_the_first() -> None:
    """A convolution reads its weight in four dimensions, a product does not."""

    class Product(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return as_product(SHAPE, x, self.weight, self.bias)

    x = torch.randn(2, 3, 8, 12)
    for kind, product in ((nn.Conv2d, False), (Product, True)):
        module = kind(3, 5, (4, 2), (4, 2))
        with torch.no_grad():
            recording = record(module, {"x": x}, state_of(module), CPU, module)
        assert wanted_as_in(recording.program)(SHAPE, CPU) is product


@pytest.mark.parametrize(("times", "chosen"), [([10.0, 9.4], True), ([10.0, 9.6], False)])
def test_the_product_must_be_faster(monkeypatch: pytest.MonkeyPatch, times: list[float], chosen: bool) -> None:
    """The choice is one that later builds find."""

    def timed(calls: list[Any], _: torch.device) -> list[float]:
        library, product = (call() for call in calls)
        torch.testing.assert_close(library, product)
        return times

    monkeypatch.setattr(measure, "kernel_times_us", timed)
    with using(Choices()) as choices:
        assert patches_pass.is_faster(SHAPE, CPU) is chosen
    (made,) = choices.made()
    assert made.times.task == "patches of 4x2, float32, 2x3x8x12 to 5"


def test_the_function_is_the_modules() -> None:
    """Without a bias, too."""
    torch.manual_seed(1)
    x, weight = torch.randn(2, 3, 8, 12), torch.randn(5, 3, 4, 2)
    torch.testing.assert_close(as_product(SHAPE, x, weight, None), functional.conv2d(x, weight, None, (4, 2)))
