"""Sums in several parts by our own kernel: where they are seen, and that operators and kernel compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.kernels import epilogues, split_k, split_k_pass, ways
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.epilogues import choose_ways
from nimble_jobs.kernels.own_kernels import put_in_place
from nimble_jobs.kernels.split_k import CONVOLUTION, PRODUCT, launched
from nimble_jobs.kernels.split_k_pass import split_products
from nimble_jobs.kernels.split_k_shape import Shape, product_shape
from tests.kernel_trials import interpreted, timed_as

# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = Shape(
    dtype="bfloat16",
    images=1,
    channels=256,
    height=5,
    width=4,
    features=16,
    kernel=(3, 1),
    stride=(2, 1),
    padding=(1, 0),
)


def traced(module: nn.Module, x: torch.Tensor, change: Callable[[torch.fx.Graph], object]) -> tuple[Any, set[Any]]:
    """What a module's graph computes after a change, and the operators in it."""
    names, weights = zip(*module.named_parameters(), strict=True)

    def call(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    with torch.no_grad():
        made = make_fx(call, tracing_mode="fake")(x, *weights)
        change(made.graph)
        made.recompile()
        return made(x, *weights), {node.target for node in made.graph.nodes}


def test_shapes_that_are_worth_dividing() -> None:
    """Parts divide the sum evenly and fill the device; many pixels, odd channels and single precision have no way."""
    deep = Shape(
        dtype="float16", images=1, channels=256, height=14, width=14, features=256, kernel=(3, 3), padding=(1, 1)
    )
    assert (deep.out, deep.pixels, deep.ways) == ((14, 14), 196, ("64x64x64/9",))
    assert SMALL.out == (3, 4)
    assert SMALL.ways == ("64x64x64/12",)
    wide = {**vars(deep), "height": 17, "width": 17, "features": 160, "kernel": (1, 7), "padding": (0, 3)}
    assert Shape(**{**wide, "channels": 160}).ways == ("64x64x32/7",)
    assert Shape(**{**vars(deep), "channels": 48, "kernel": (5, 5), "padding": (2, 2)}).ways == ("64x64x16/5",)
    assert Shape(**{**vars(deep), "channels": 64}).ways == ("64x64x64/9",)
    picture = {"channels": 3, "height": 224, "width": 224, "features": 64, "stride": (2, 2)}
    assert Shape(**{**vars(deep), **picture, "kernel": (7, 7), "padding": (3, 3)}).ways == ("64x64x32-rows/1",)
    assert Shape(**{**vars(deep), **picture, "height": 30, "width": 30}).ways == ("64x64x16-rows/3",)
    assert not Shape(**{**vars(deep), **picture, "images": 3}).ways, "too many pixels to write them in fp32"
    for change in (
        {"height": 112, "width": 112},
        {"channels": 100},
        {"dtype": "float32"},
        {"features": 9},
        {"channels": 24},  # a row of the window has more than 64 values
        {"channels": 512, "kernel": (1, 1), "padding": (0, 0)},
    ):
        assert not Shape(**{**vars(deep), **change}).ways
    assert product_shape("float16", (2, 64, 3072), (768, 3072)).ways == ("64x64x64/6",)


def test_a_convolution_in_parts_computes_the_same() -> None:
    """With a bias and without one, and whatever follows."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(128, 256, 3, stride=2, padding=1)
            self.second = nn.Conv2d(256, 16, (1, 3), padding=(0, 1), bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu()).sigmoid()

    module = Net().eval().bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(2, 128, 6, 6).bfloat16().contiguous(memory_format=torch.channels_last)

    def change(graph: torch.fx.Graph) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(epilogues, "fastest", lambda group, *_: group.ways[-1])
            choose_ways(graph, CPU)

    out, operators = traced(module, x, change)
    torch.testing.assert_close(out, module(x))
    assert out.stride() == module(x).stride()
    assert CONVOLUTION in operators
    assert torch.ops.aten.convolution.default not in operators


def test_inductor_takes_the_parts(request: pytest.FixtureRequest) -> None:
    """It knows every operator that the passes put into its graph."""
    if not request.config.getoption("--all"):
        pytest.skip("takes a C++ compiler half a minute; with --all")
    from torch._inductor.custom_graph_pass import CustomGraphPass  # imports half of the compiler

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(128, 64, 3), nn.Linear(64 * 16, 16)
            self.dilated = nn.Conv2d(64, 64, 3, padding=2, dilation=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.dilated(self.first(x).relu()).relu()
            return self.last(y.permute(0, 2, 3, 1).flatten(1)).sigmoid()

    seen: list[str] = []

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            choose_ways(graph, CPU, lambda _, way: seen.append(way))
            split_products(graph, CPU, lambda _, way: seen.append(way))

        def uuid(self) -> None:
            return None

    torch.manual_seed(0)
    module = Net().eval().bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(1, 128, 6, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(epilogues, "fastest", lambda group, *_: group.ways[-1])
        patch.setattr(split_k_pass, "fastest", lambda shape, *_, **__: shape.ways[0])
        out = torch.compile(module, options={"post_grad_custom_post_pass": Pass()})(x)
        torch.testing.assert_close(out, module(x), rtol=2e-2, atol=2e-2)
    forget_compiled()
    assert seen == ["64x64x64/18", "64x64x64/9", "64x64x64/16"]


def test_linear_layers_in_parts_compute_the_same() -> None:
    """Only those of long sums that a pointwise operator follows, also through a view."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.bare = nn.Linear(768, 64), nn.Linear(768, 64, bias=False)
            self.read, self.short = nn.Linear(768, 768), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.long(x) + 1.0
            y = functional.layer_norm(self.short(y) + self.bare(x), (64,))
            return y, self.bare(self.read(x))

    module, x = Net().eval().bfloat16(), torch.randn(2, 3, 768).bfloat16()
    seen: list[tuple[Shape, str]] = []
    asked: list[dict[str, bool]] = []
    small = 0

    def change(graph: torch.fx.Graph) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(split_k_pass, "_SMALL", small)
            patch.setattr(split_k_pass, "fastest", lambda shape, _, **more: asked.append(more) or shape.ways[0])
            split_products(graph, CPU, lambda shape, way: seen.append((shape, way)))

    out, operators = traced(module, x, change)
    torch.testing.assert_close(out, module(x), rtol=2e-2, atol=2e-2)
    shape = product_shape("bfloat16", (6, 768), (64, 768))
    assert seen == [(shape, shape.ways[0])] * 2
    assert asked == [{"followed": True}] * 2
    assert {PRODUCT, torch.ops.aten.addmm.default, torch.ops.aten.mm.default} <= operators

    small = 6 * 64  # results: then the last one is divided too, whoever reads it
    out, _ = traced(module, x, change)
    torch.testing.assert_close(out, module(x), rtol=2e-2, atol=2e-2)
    assert asked[2:] == [{"followed": True}, {"followed": True}, {"followed": False}]


def test_compilers_are_told_how_our_operators_read() -> None:
    """Inductor gives an operator that a pass put in any layout, where that does not say which one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = nn.Conv2d(8, 64, 1), nn.Conv2d(8, 64, 1), nn.Conv2d(128, 64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.cat([self.left(x).relu(), self.right(x).relu()], 1)).sigmoid()

    found: list[tuple[int, ...]] = []

    def change(graph: torch.fx.Graph) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(epilogues, "fastest", lambda group, *_: group.ways[-1])
            choose_ways(graph, CPU)
        (node,) = graph.find_nodes(op="call_function", target=CONVOLUTION)
        found.extend(value.stride() for value in node.meta["eager_input_vals"][0][:2])

    module = Net().eval().bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(1, 8, 6, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    traced(module, x, change)
    assert found == [(4608, 1, 768, 128), (1152, 1, 384, 128)]


def test_only_a_turned_weight_is_a_linear_layers() -> None:
    """One that is permuted to where it was is another product."""

    class Square(nn.Module):
        def __init__(self, *dims: int) -> None:
            super().__init__()
            self.weight, self.dims = nn.Parameter(torch.randn(768, 768).bfloat16() / 28), dims

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, self.weight.permute(self.dims)) + 1.0

    x, seen = torch.randn(6, 768).bfloat16(), list[Shape]()
    for dims, count in (((0, 1), 0), ((1, 0), 1)):
        module = Square(*dims)

        def change(graph: torch.fx.Graph) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(split_k_pass, "fastest", lambda shape, *_, **__: shape.ways[0])
                split_products(graph, CPU, lambda shape, _: seen.append(shape))

        out, _ = traced(module, x, change)
        torch.testing.assert_close(out, module(x), rtol=2e-2, atol=2e-2)
        assert len(seen) == count


class Operators(nn.Module):
    """Both, as the passes leave them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(256, 16, (3, 1)), nn.Linear(768, 64)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = CONVOLUTION(x, self.convolution.weight, [2, 1], [1, 0], "64x64x64/12")
        return parts.sum(0), PRODUCT(rows, self.linear.weight, "64x64x64/12").sum(0)


def test_our_kernel_takes_the_operators_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be stored, and writes what the operator wrote. Over memory that it cannot read the operators stay."""
    monkeypatch.setattr(split_k, "capability_of", lambda _: 90)
    module = Operators().eval().bfloat16().to(memory_format=torch.channels_last)
    x, rows = torch.randn(1, 256, 5, 4).bfloat16(), torch.randn(6, 768).bfloat16()
    laid = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        recording = record(module, {"x": laid, "rows": rows}, state_of(module), CPU, module)
        other = {"x": x, "rows": torch.randn(6, 1536).bfloat16()[:, ::2]}
        gaps = record(module, other, state_of(module), CPU, module)
    assert put_in_place(recording, CPU, launched) is recording, "a CPU runs none"
    assert put_in_place(gaps, GPU, launched).program == gaps.program
    ours = put_in_place(recording, GPU, launched)
    product = product_shape("bfloat16", (6, 768), (64, 768))
    assert set(ours.kernels) == {SMALL.name("64x64x64/12"), product.name("64x64x64/12")}
    assert pack(ours.kernels) is not None
    changed = [(b, a) for b, a in zip(recording.program.tasks, ours.program.tasks, strict=True) if a != b]
    assert len(changed) == 2
    for before, after in changed:
        assert after.args == (*before.args[:2], before.outputs)
        assert (after.reads, after.writes, after.mutates) == (before.reads, before.writes, before.writes)


@pytest.mark.parametrize(
    ("times", "wrong", "way"),
    [([10.0, 9.4], None, "64x64x64/12"), ([10.0, 9.6], None, "library"), ([10.0], 0, "library")],
)
def test_a_product_in_parts_must_be_faster_and_agree(
    monkeypatch: pytest.MonkeyPatch, times: list[float], wrong: int | None, way: str
) -> None:
    """The choice is one that later builds find."""
    norms = iter(1.0 if i == wrong else 0.0 for i in range(1))
    monkeypatch.setattr(split_k_pass, "compiled", lambda *_: lambda *_: None)
    monkeypatch.setattr(split_k_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(ways, "relative_norm", lambda *_: next(norms))
    monkeypatch.setattr(split_k_pass, "_CACHED_BYTES", 0)

    timed_as(monkeypatch, times)
    with using(Choices()) as choices:
        assert split_k_pass.fastest(product_shape("bfloat16", (6, 768), (64, 768)), CPU) == way
    (made,) = choices.made()
    assert made.times.task == "linear layer, bfloat16, 6x768 to 64"


_INTERPRETED = """
import torch
from nimble_jobs.kernels import split_k_triton
from nimble_jobs.kernels.split_k_shape import Shape, constants, product_shape

torch.manual_seed(0)
shapes = [
    Shape(dtype="float16", images=2, channels=128, height=5, width=6, features=72, kernel=(3, 3), padding=(1, 1)),
    Shape(
        dtype="float16", images=1, channels=64, height=9, width=4, features=8,
        kernel=(3, 1), stride=(2, 1), padding=(1, 0),
    ),
    product_shape("float16", (7, 192), (64, 192)),
    Shape(dtype="float16", images=1, channels=96, height=4, width=5, features=8, kernel=(1, 3), padding=(0, 1)),
    Shape(dtype="float16", images=1, channels=48, height=5, width=4, features=24, kernel=(5, 5), padding=(2, 2)),
    Shape(
        dtype="float16", images=2, channels=3, height=9, width=11, features=16,
        kernel=(6, 7), stride=(2, 2), padding=(3, 3),
    ),
    Shape(dtype="float16", images=1, channels=5, height=4, width=4, features=8, kernel=(3, 3), padding=(1, 1)),
]
for shape in shapes:
    x = torch.randn(shape.images, shape.channels, shape.height, shape.width).half()
    weight = torch.randn(shape.features, shape.channels, *shape.kernel).half() / 8
    expected = torch.nn.functional.conv2d(x.float(), weight.float(), None, shape.stride, shape.padding)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    tiles = (f"64x64x{block}" for block in (64, 32, 16) if shape.channels % block == 0)
    tile = next(tiles, shape.ways[0].partition("/")[0] if shape.ways else "")
    for parts in (1, 3):
        out = torch.full((parts, shape.pixels, shape.features), float("nan"))
        grid = (-(-shape.pixels // 64), -(-shape.features // 64), parts)
        split_k_triton.split_k[grid](x, weight, out, **constants(shape, f"{tile}/{parts}"))
        found = out.sum(0).view(shape.images, *shape.out, shape.features).permute(0, 3, 1, 2)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
print("equal")
"""


def test_the_kernel_computes_what_torch_does() -> None:
    """By Triton's interpreter, which has to be asked for before Triton is imported."""
    interpreted(_INTERPRETED)
