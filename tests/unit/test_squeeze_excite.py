"""Squeeze-and-excitation by our own kernels: where it is seen, and that operators and kernels compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.engine import measure
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels import squeeze_excite, squeeze_excite_pass, ways
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.own_kernels import put_in_place
from nimble_jobs.kernels.squeeze_excite import EXCITE, SQUEEZE, Shape, compiled, launched, wanted_as_in
from tests.kernel_trials import interpreted, rewritten, timed_as

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = Shape(dtype="float16", images=1, channels=144, height=56, width=56, hidden=6, silu=True, sigmoid=True)
# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Block(nn.Module):
    """A convolution with squeeze-and-excitation, in the words of torchvision or of timm."""

    def __init__(self, kind: str = "torchvision") -> None:
        super().__init__()
        self.kind = kind
        self.before = nn.Conv2d(3, 24, 3)
        self.fc1, self.fc2 = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.before(x), inplace=True)
        match self.kind:
            case "torchvision":
                scale = self.fc2(functional.silu(self.fc1(functional.adaptive_avg_pool2d(x, 1)), inplace=True))
                return torch.sigmoid(scale) * x
            case "timm":
                return x * self.fc2(functional.relu(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()
            case "hard":
                scale = self.fc2(functional.relu(self.fc1(functional.adaptive_avg_pool2d(x, (1, 1)))))
                return x * functional.hardsigmoid(scale)
            case "rows":  # averages one dimension only
                return x * self.fc2(functional.relu(self.fc1(x.mean((2,), keepdim=True)))).sigmoid()
            case "read elsewhere":
                scale = self.fc2(functional.relu(self.fc1(functional.adaptive_avg_pool2d(x, 1))))
                return x * scale.sigmoid() + x
            case "twice":  # the gates are used again
                gate = self.fc2(functional.relu(self.fc1(functional.adaptive_avg_pool2d(x, 1)))).sigmoid()
                return x * gate + gate
            case _:
                scale = self.fc2(functional.gelu(self.fc1(functional.adaptive_avg_pool2d(x, 1))))
                return x * scale.sigmoid()


def replaced(
    module: nn.Module, x: torch.Tensor, wanted: Callable[[Shape, torch.device], bool]
) -> tuple[torch.Tensor, int]:
    """What the module gives once the pass has been over its graph, and how often our operators are in it."""
    counts: list[int] = []
    out = rewritten(
        module, x.clone(), change=lambda graph: counts.append(squeeze_excite_pass.rewrite(graph, CPU, wanted))
    )
    return out, sum(counts)


def images(module: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    """A module and its input, both channels-last."""
    torch.manual_seed(0)
    module = module.eval().to(memory_format=torch.channels_last)
    return module, torch.randn(2, 3, 9, 7).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("torchvision", 1), ("timm", 1), ("hard", 1), ("rows", 0), ("read elsewhere", 0), ("twice", 0), ("gelu", 0)],
)
def test_it_is_seen_and_computes_the_same(kind: str, count: int) -> None:
    """What is not quite squeeze-and-excitation stays as it is."""
    module, x = images(Block(kind))
    seen = []
    out, found = replaced(module, x, lambda shape, _: seen.append(shape) or True)  # type: ignore[func-returns-value]
    assert found == count
    with torch.no_grad():
        torch.testing.assert_close(out, module(x))
    for shape in seen:
        assert (shape.images, shape.channels, shape.height, shape.width, shape.hidden) == (2, 24, 7, 5, 6)
        assert (shape.silu, shape.sigmoid) == (kind == "torchvision", kind != "hard")


def test_where_it_is_slower_or_contiguous_nothing_changes() -> None:
    """The kernels read channels-last images only."""
    module, x = images(Block())
    assert replaced(module, x, lambda *_: False)[1] == 0
    assert replaced(Block().eval(), torch.randn(2, 3, 9, 7), lambda *_: True)[1] == 0


class Operators(nn.Module):
    """The two operators, as the pass leaves them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc1 = nn.Conv2d(shape.channels, shape.hidden, 1)
        self.fc2 = nn.Conv2d(shape.hidden, shape.channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = SQUEEZE(x, self.fc1.weight, self.shape.parts)
        return EXCITE(x, parts, self.fc1.bias, self.fc2.weight, self.fc2.bias, self.shape.silu, self.shape.sigmoid)


def test_our_kernels_take_the_operators_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be stored, write what the operators wrote, and a later recording of the module has them again."""
    shape = replace(SHAPE, dtype="float32", channels=20, height=4, width=4)
    module = Operators(shape).eval()
    x = torch.randn(1, 20, 4, 4).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        recording = record(module, {"x": x}, state_of(module), CPU, module)
    assert put_in_place(recording, CPU, launched) is recording, "a CPU runs none"
    assert [task.op for task in recording.program.tasks] == [str(SQUEEZE), str(EXCITE)]
    monkeypatch.setattr(squeeze_excite, "capability_of", lambda _: 90)
    ours = put_in_place(recording, GPU, launched)
    assert [task.op for task in ours.program.tasks] == list(shape.names) == sorted(ours.kernels, reverse=True)
    for before, after in zip(recording.program.tasks, ours.program.tasks, strict=True):
        assert after.args[-1] == before.outputs
        assert (after.reads, after.writes, after.mutates) == (before.reads, before.writes, before.writes)
    assert pack(ours.kernels) is not None
    assert wanted_as_in(ours.program)(shape, GPU)
    assert not wanted_as_in(recording.program)(shape, GPU)


def test_over_other_memory_the_operators_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute the same over any."""
    shape = replace(SHAPE, dtype="float32", channels=20, height=4, width=4)
    module = Operators(shape).eval()
    with torch.no_grad():
        recording = record(module, {"x": torch.randn(1, 20, 4, 4)}, state_of(module), CPU, module)
    monkeypatch.setattr(squeeze_excite, "capability_of", lambda _: 90)
    assert put_in_place(recording, GPU, launched).program == recording.program


@pytest.mark.parametrize(("ours_us", "agrees", "chosen"), [(7.9, True, True), (8.1, True, False), (1.0, False, False)])
def test_ours_must_be_clearly_faster_and_agree(
    monkeypatch: pytest.MonkeyPatch, ours_us: float, agrees: bool, chosen: bool
) -> None:
    """Compilers fuse some of what the operators of torch do one by one, so ours need a margin."""
    monkeypatch.setattr(squeeze_excite_pass, "compiled", lambda *_: (lambda *_: None, lambda *_: None))
    monkeypatch.setattr(squeeze_excite_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(ways, "relative_norm", lambda *_: 0.0 if agrees else 1.0)
    timed_as(monkeypatch, [10.0, ours_us][: 1 + agrees])
    with using(Choices()) as choices:
        assert squeeze_excite_pass.is_faster(replace(SHAPE, dtype="float32", height=4, width=4), CPU) is chosen
    (made,) = choices.made()
    assert made.times.task == "squeeze-and-excitation, float32, 1x144x4x4, 6 hidden"


def test_what_triton_cannot_compile_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape costs no candidate."""

    def fails(*_: object) -> None:
        raise EngineError("no")

    monkeypatch.setattr(squeeze_excite_pass, "compiled", fails)
    monkeypatch.setattr(squeeze_excite_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(measure, "kernel_times_us", lambda calls, _: [1.0 for _ in calls])
    with using(Choices()):
        assert not squeeze_excite_pass.is_faster(replace(SHAPE, dtype="float32", height=4, width=4), CPU)


@pytest.mark.parametrize(
    ("images", "channels", "side", "hidden"), [(1, 32, 112, 8), (1, 1152, 7, 48), (64, 1152, 7, 48), (1, 8, 1, 1)]
)
def test_grids_cover_all_channels_and_pixels(images: int, channels: int, side: int, hidden: int) -> None:
    """Each block has work, and what the second kernel adds up is what the first one wrote."""
    shape = replace(SHAPE, images=images, channels=channels, height=side, width=side, hidden=hidden)
    for kernel in (0, 1):
        across, shares, deep = shape.grid(kernel)
        sizes = shape.constants(kernel)
        assert across * shape.block >= channels > (across - 1) * shape.block
        assert shares * sizes["SHARE"] >= side * side
        assert deep == images
    assert shape.constants(1)["PARTS"] == shape.parts == shape.grid(0)[0] * shape.grid(0)[1]
    assert compiled(shape, 90)[1].grid == shape.grid(1)


_INTERPRETED = """
import torch
from nimble_jobs.kernels.squeeze_excite import EXCITE, SQUEEZE, Shape
from nimble_jobs.kernels import squeeze_excite_triton as kernels

torch.manual_seed(0)
for images, channels, side, hidden, silu, sigmoid in [(2, 20, 7, 5, True, True), (1, 70, 9, 17, False, False)]:
    shape = Shape(dtype="float16", images=images, channels=channels, height=side, width=side, hidden=hidden,
                  silu=silu, sigmoid=sigmoid)
    x = torch.randn(images, channels, side, side).half().contiguous(memory_format=torch.channels_last)
    w, b, v, c = (torch.randn(*s).half() for s in ((hidden, channels), (hidden,), (channels, hidden), (channels,)))
    for value in (0.5, float("nan")):
        x[0, 1, 2, 3] = value
        parts = torch.full((images, shape.parts, hidden), float("nan"))
        out = torch.full_like(x, float("nan"))
        kernels.squeeze[shape.grid(0)](x, w, parts, **shape.constants(0))
        kernels.excite[shape.grid(1)](x, parts, b, v, c, out, **shape.constants(1))
        expected = SQUEEZE(x, w[:, :, None, None], 1)
        torch.testing.assert_close(parts.sum(1), expected[:, 0], rtol=1e-4, atol=1e-4, equal_nan=True)
        expected = EXCITE(x, expected, b, v[:, :, None, None], c, silu, sigmoid)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3, equal_nan=True)
print("equal")
"""


def test_the_kernels_compute_what_the_operators_do() -> None:
    """By Triton's interpreter, which has to be asked for before Triton is imported."""
    interpreted(_INTERPRETED)
