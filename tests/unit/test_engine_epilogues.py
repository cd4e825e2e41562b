"""Convolutions with what follows them: which groups are seen, and that each way to run one computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from nimble_jobs.engine import measure
from nimble_jobs.engine.encode import operator
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.errors import EngineError
from nimble_jobs.kernel_switches import Kernel
from nimble_jobs.kernels import epilogue_ways, epilogues, pointwise_pass
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.epilogue_ways import Follows, Group, Way
from nimble_jobs.kernels.epilogues import choose_ways
from nimble_jobs.kernels.pointwise import OPERATOR, Shape

CPU = torch.device("cpu")
Run = Callable[[nn.Module, torch.Tensor, Callable[[Group], Way]], tuple[Any, Counter[Any]]]
# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Block(nn.Module):
    """Every kind of group: ReLU, addition with ReLU, a bias alone, and two whose pointwise kernel runs in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(8, 4, 1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 8, 1)
        self.bare = nn.Conv2d(8, 8, 1)
        self.left = nn.Conv2d(8, 3, 1)
        self.right = nn.Conv2d(8, 5, 1, bias=False)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.narrow(x).relu()).relu()
        y = (self.wide(y) + x).relu()
        y = self.bare(y)
        y = torch.cat([self.left(y).relu(), self.right(y).sigmoid()], 1)
        return self.last(y).sigmoid()


@pytest.fixture(params=["as traced", "compiled"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a module over an input after the pass, and counts what it saw: over the graph as it is traced; with `--all`
    also in Inductor, which has a C++ compiler at work for half a minute.
    """
    compiled = request.param == "compiled"
    if compiled and not request.config.getoption("--all"):
        pytest.skip("takes a C++ compiler half a minute; with --all")
    yield _compiled if compiled else _traced
    if compiled:
        forget_compiled()


def _pass(graph: torch.fx.Graph, way: Callable[[Group], Way]) -> Counter[Any]:
    seen: Counter[Any] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epilogues, "fastest", lambda group, *_: way(group))
        choose_ways(graph, CPU, lambda group, way: seen.update([(group.follows, way)]))
    return seen


def _traced(module: nn.Module, x: torch.Tensor, way: Callable[[Group], Way]) -> tuple[Any, Counter[Any]]:
    names, weights = zip(*module.named_parameters(), strict=True)

    def call(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    with torch.no_grad():
        traced = make_fx(call, tracing_mode="fake")(x, *weights)
        seen = _pass(traced.graph, way)
        traced.recompile()
        return traced(x, *weights), seen


def _compiled(module: nn.Module, x: torch.Tensor, way: Callable[[Group], Way]) -> tuple[Any, Counter[Any]]:
    from torch._inductor.custom_graph_pass import CustomGraphPass  # imports half of the compiler

    seen: Counter[Any] = Counter()

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.update(_pass(graph, way))

        def uuid(self) -> None:
            return None

    with torch.no_grad():
        return torch.compile(module, options={"post_grad_custom_post_pass": Pass()})(x), seen


def test_groups_are_seen_and_products_compute_the_same(run: Run) -> None:
    """Each 1x1 convolution as a product, with ReLU or bias in it only where no other kernel does that at no cost."""
    torch.manual_seed(0)
    block = Block().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    out, seen = run(block, x, lambda group: "product" if group.is_product else "library")
    torch.testing.assert_close(out, block(x))
    assert seen == {
        ("relu", "product"): 1,
        ("relu", "library"): 1,
        ("add-relu", "product"): 1,
        ("bias", "product"): 1,
        ("nothing", "product"): 3,
    }


def test_our_kernels_operator_is_put_in_place(run: Run) -> None:
    """With and without bias, with ReLU or a sum and ReLU where no other kernel does that at no cost, and with pixels
    left out.
    """
    torch.manual_seed(0)
    block = Block().eval().to(memory_format=torch.channels_last)
    block.right.stride = block.left.stride = (2, 2)
    x = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    out, seen = run(block, x, lambda group: "library" if group.weight[2:] == (3, 3) else "pointwise 16x32x64")
    torch.testing.assert_close(out, block(x))
    assert seen == {
        ("relu", "pointwise 16x32x64"): 1,
        ("relu", "library"): 1,
        ("add-relu", "pointwise 16x32x64"): 1,
        ("bias", "pointwise 16x32x64"): 1,
        ("nothing", "pointwise 16x32x64"): 3,
    }


def test_when_our_kernel_is_tried() -> None:
    """For half precision and even numbers of channels; not for a sum alone, nor once it is switched off."""
    one = replace(GROUP, weight=(16, 8, 1, 1), out=(1, 16, 6, 6))
    kinds: tuple[Follows, ...] = ("nothing", "bias", "relu", "add-relu")
    for follows in kinds:
        group = replace(one, follows=follows)
        assert [way for way in group.ways if way.startswith("pointwise ")] == [
            "pointwise 16x32x64",
            "pointwise 32x32x64",
        ]
        assert not any(way.startswith("pointwise ") for way in group.allowed(frozenset({Kernel.POINTWISE})))
        assert (group.pointwise.activation, group.pointwise.added) == (
            "relu" if follows.endswith("relu") else "",
            follows == "add-relu",
        )
    for other in (
        replace(one, follows="add"),
        replace(one, weight=(15, 8, 1, 1), out=(1, 15, 6, 6)),
        replace(one, dtype=torch.float32),
        replace(one, stride=(2, 1)),
        replace(one, weight=(16, 8, 3, 3), out=(1, 16, 4, 4)),
    ):
        assert not any(way.startswith("pointwise ") for way in other.ways)


def test_contiguous_tensors_are_left_alone(run: Run) -> None:
    """Products would have to move every pixel."""
    block = Block().eval()
    x = torch.randn(2, 8, 6, 6)
    out, seen = run(block, x, lambda _: "product")
    torch.testing.assert_close(out, block(x))
    assert not seen


def test_fused_convolutions_are_put_in_place(run: Run) -> None:
    """With cuDNN's stood in for, since the CPU has none."""
    library = torch.library.Library("nimble_jobs", "IMPL")

    def relu(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups).relu()

    def add_relu(x: Any, weight: Any, z: Any, bias: Any, *rest: Any) -> Any:
        return (torch.conv2d(x, weight, bias, *rest) + z).relu()

    library.impl("convolution_relu", relu, "CPU")
    library.impl("convolution_add_relu", add_relu, "CPU")
    try:
        torch.manual_seed(0)
        block = Block().eval().to(memory_format=torch.channels_last)
        x = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        out, seen = run(block, x, lambda group: "fused" if group.follows.endswith("relu") else "library")
        torch.testing.assert_close(out, block(x))
        assert seen[("relu", "fused")] == 2
        assert seen[("add-relu", "fused")] == 1
    finally:
        library._destroy()


def test_schedules_name_the_operators() -> None:
    """A process that only loads schedules knows them."""
    assert operator("nimble_jobs.convolution_relu.default")._schema.name == "nimble_jobs::convolution_relu"
    assert operator("nimble_jobs.convolution_add_relu.default")._schema.name == "nimble_jobs::convolution_add_relu"


GROUP = Group(
    dtype=torch.float16,
    x=(1, 8, 6, 6),
    weight=(4, 8, 1, 1),
    out=(1, 4, 6, 6),
    bias=True,
    stride=(1, 1),
    padding=(0, 0),
    dilation=(1, 1),
    groups=1,
    follows="relu",
)


@pytest.fixture
def choices() -> Iterator[Choices]:
    """Of a build that knows nothing yet."""
    with using(Choices()) as found:
        yield found


@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize(("product", "way"), [(9.8, "library"), (9.6, "product")])
def test_another_way_must_be_clearly_faster(monkeypatch: pytest.MonkeyPatch, product: float, way: Way) -> None:
    """Within three percent the library's stays."""
    times = {"library": 10.0, "fused": 11.0, "product": product}
    monkeypatch.setattr(epilogue_ways, "times_us", lambda *_: times)
    assert epilogue_ways.fastest(GROUP, CPU) == way


def test_a_group_is_measured_once_for_each_precision(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    """What is fastest in TF32 need not be so without it."""
    measured = []
    times = {"library": 10.0, "fused": 11.0, "product": 5.0}
    monkeypatch.setattr(epilogue_ways, "times_us", lambda *_: measured.append(1) or times)
    for _ in range(2):
        epilogue_ways.fastest(GROUP, CPU)
    assert len(measured) == 1
    (made,) = choices.made()
    assert (made.tasks, made.times.task) == (2, "convolution 1x1, float16, 1x8x6x6 to 1x4x6x6, then relu")
    monkeypatch.setattr("nimble_jobs.engine.device.precision", lambda _: {"precision.conv": "tf32"})
    epilogue_ways.fastest(GROUP, CPU)
    assert len(measured) == 2


@pytest.mark.parametrize("follows", ["nothing", "bias", "relu", "add", "add-relu"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_every_way_that_is_measured_is_one_of_the_ways(
    monkeypatch: pytest.MonkeyPatch, follows: Follows, kernel: int
) -> None:
    """A choice of an earlier build is taken only if the ways are the same."""
    monkeypatch.setattr(measure, "kernel_times_us", lambda calls, _: [1.0] * len(calls))
    group = replace(GROUP, dtype=torch.float32, follows=follows, weight=(4, 8, kernel, kernel))
    assert tuple(epilogue_ways.times_us(group, CPU)) == group.ways


@pytest.mark.parametrize("follows", ["nothing", "bias", "relu", "add-relu"])
def test_our_kernel_is_timed_beside_the_others(monkeypatch: pytest.MonkeyPatch, follows: Follows) -> None:
    """A tile that does not compile, or is wrong, is left out."""

    def compiled(shape: Shape, tile: str, _: int) -> Callable[..., None]:
        if tile.startswith("16x"):
            raise EngineError("does not compile")

        def call(x: Any, weight: Any, bias: Any, other: Any, out: Any, *_: int) -> None:
            out.copy_(OPERATOR(x, weight, bias, other if shape.added else None, shape.activation, tile))

        return call

    monkeypatch.setattr(pointwise_pass, "compiled", compiled)
    monkeypatch.setattr(pointwise_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(measure, "kernel_times_us", lambda calls, _: [float(call() is not calls) for call in calls])
    monkeypatch.setattr(epilogue_ways, "CONVOLUTION_RELU", lambda *_: None)
    monkeypatch.setattr(epilogue_ways, "CONVOLUTION_ADD_RELU", lambda *_: None)
    group = replace(GROUP, weight=(16, 8, 1, 1), out=(1, 16, 6, 6), follows=follows, dtype=torch.bfloat16)
    without = frozenset({Kernel.PRODUCT})  # with ReLU there is none on a CPU
    times = epilogue_ways.times_us(group, CPU, without)
    assert set(group.allowed(without)) - set(times) == {"pointwise 16x32x64"}
    assert "pointwise 32x32x64" in times
