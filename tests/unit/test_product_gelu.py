"""Linear layers with GELU by our own kernel: where they are seen, and that operator and kernel compute the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.engine import static_kernel
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.engine.static_kernel import StaticKernel, pack, unpack
from nimble_jobs.kernels import product_gelu, product_gelu_pass, ways
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.own_kernels import put_in_place
from nimble_jobs.kernels.product_gelu import (
    OPERATOR,
    TILES_FEW_ROWS,
    TILES_MANY_ROWS,
    Shape,
    compiled,
    launched,
    wanted_as_in,
)
from tests.kernel_trials import interpreted, rewritten, timed_as

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = Shape(dtype="bfloat16", rows=6, features=64, inputs=128)
# torch's own compiler warns of torch.jit, which it imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Net(nn.Module):
    """One layer that is to be seen, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.odd = nn.Linear(128, 64), nn.Linear(64, 60)
        self.rounded, self.twice = nn.Linear(60, 64), nn.Linear(64, 64)
        self.bare = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.seen(x)
        x.zero_()  # ours must not read it later
        x = functional.gelu(self.odd(functional.gelu(y)))
        x = self.twice(functional.gelu(self.rounded(x), approximate="tanh"))
        return functional.gelu(x) + x + functional.gelu(self.bare(x))


def test_they_are_seen_and_compute_the_same() -> None:
    """Only an exact GELU that alone reads a layer of whole tiles is one."""
    torch.manual_seed(0)
    module, x = Net().eval().to(torch.bfloat16), torch.randn(2, 3, 128, dtype=torch.bfloat16)
    seen: list[Shape] = []

    def wanted(shape: Shape, _: torch.device) -> str:
        seen.append(shape)
        return "64x64x64"

    def change(graph: torch.fx.Graph) -> None:
        assert product_gelu_pass.rewrite(graph, CPU, lambda *_: None) == 0
        assert product_gelu_pass.rewrite(graph, CPU, wanted) == 1

    out = rewritten(module, x.clone(), change=change)
    with torch.no_grad():
        torch.testing.assert_close(out, module(x.clone()))
    assert seen == [SHAPE]


class Operator(nn.Module):
    """The operator, as the pass leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATOR(x, self.layer.weight, self.layer.bias, "64x32x128")


def test_our_kernel_takes_the_operators_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be stored, and writes what the operator wrote. Over rows with gaps the operator stays."""
    module, x = Operator().eval().to(torch.bfloat16), torch.randn(2, 3, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(product_gelu, "capability_of", lambda _: 90)
    with torch.no_grad():
        recording = record(module, {"x": x}, state_of(module), CPU, module)
        sparse = {"x": torch.randn(2, 3, 256, dtype=torch.bfloat16)[..., ::2]}
        gaps = record(module, sparse, state_of(module), CPU, module)
    assert put_in_place(recording, CPU, launched) is recording, "a CPU runs none"
    assert put_in_place(gaps, GPU, launched).program == gaps.program
    ours = put_in_place(recording, GPU, launched)
    (before,), (after,) = recording.program.tasks, ours.program.tasks
    assert list(ours.kernels) == [after.op] == [SHAPE.name("64x32x128")]
    assert after.args == (*before.args[:3], before.outputs)
    assert (after.reads, after.writes, after.mutates) == (before.reads, before.writes, before.writes)
    assert pack(ours.kernels) is not None
    assert wanted_as_in(ours.program)(SHAPE, GPU) == "64x32x128"
    assert wanted_as_in(recording.program)(SHAPE, GPU) is None


class Many(nn.Module):
    """The operator over more rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATOR(x, self.layer.weight, self.layer.bias, "128x256x64")


def test_many_rows_have_a_kernel_that_is_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs memory for its tensor descriptors, also when it was stored. Batches of other lengths share its code."""
    module = Many().eval().to(torch.bfloat16)
    monkeypatch.setattr(product_gelu, "capability_of", lambda _: 90)
    recordings = []
    for rows in (600, 70_000):
        x = torch.zeros(rows, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            recordings.append(put_in_place(record(module, {"x": x}, state_of(module), CPU, module), GPU, launched))
    kernels = [next(iter(each.kernels.values())) for each in recordings]
    assert [each.program.tasks[0].args[4:] for each in recordings] == [(600,), (70_000,)]
    assert [kernel.grid for kernel in kernels if isinstance(kernel, StaticKernel)] == [(5, 1, 1), (132, 1, 1)]
    packed = pack({str(n): kernel for n, kernel in enumerate(kernels)})
    assert packed is not None
    first, second = unpack(*packed).values()
    assert first.binary == second.binary == packed[1]
    assert first.scratch_bytes == second.scratch_bytes > 0
    assert Shape(dtype="float16", rows=513, features=3072, inputs=768).tiles == tuple(TILES_MANY_ROWS)
    assert Shape(dtype="float16", rows=513, features=3072, inputs=760).tiles == ()
    for rows in (300, 600):
        assert not Shape(dtype="float16", rows=rows, features=1 << 16, inputs=1 << 15).tiles, "32 bits cannot count it"


def test_scratch_memory_is_given_to_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes for each block; nothing where a kernel needs none."""
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(static_kernel, "load_function", lambda *_: 1)
    monkeypatch.setattr(static_kernel, "launch_kernel", lambda *launch: given.append(launch[5]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    kernel = compiled(Shape(dtype="float16", rows=600, features=256, inputs=64), "128x256x64", 90)
    x = torch.zeros(1)
    kernel(x, x, x, x, 600)
    replace(kernel, scratch_bytes=0)(x, x, x, x, 600)
    (*_, scratch, profile), (*_, nothing, _) = given
    assert isinstance(scratch, torch.Tensor)
    assert scratch.numel() == 5 * kernel.scratch_bytes
    assert nothing is profile is None


@pytest.mark.parametrize(
    ("times", "wrong", "tile"),
    [
        ([10.0, 9.4, 9.6, 9.5], None, "64x64x64"),
        ([10.0, 9.6, 9.7, 9.8], None, None),
        ([10.0, 5.0, 6.0], 0, "64x32x128"),  # the first tile gives something else
    ],
)
def test_the_fastest_tile_must_be_faster_and_agree(
    monkeypatch: pytest.MonkeyPatch, times: list[float], wrong: int | None, tile: str | None
) -> None:
    """The choice is one that later builds find."""
    norms = iter(1.0 if i == wrong else 0.0 for i in range(len(TILES_FEW_ROWS)))
    monkeypatch.setattr(product_gelu_pass, "compiled", lambda *_: lambda *_: None)
    monkeypatch.setattr(product_gelu_pass, "capability_of", lambda _: 90)
    monkeypatch.setattr(ways, "relative_norm", lambda *_: next(norms))
    monkeypatch.setattr(product_gelu_pass, "_CACHED_BYTES", 0)

    timed_as(monkeypatch, times)
    with using(Choices()) as choices:
        assert product_gelu_pass.fastest(SHAPE, CPU) == tile
    (made,) = choices.made()
    assert made.times.task == "linear layer, bfloat16, 6x128 to 64, then GELU"


_INTERPRETED = """
import torch
from nimble_jobs.kernels import product_gelu_triton
from nimble_jobs.kernels.product_gelu import OPERATOR

torch.manual_seed(0)
x, weight, bias = torch.randn(20, 64).half(), torch.randn(32, 64).half() / 8, torch.randn(32).half()
out = torch.full((20, 32), float("nan"), dtype=torch.float16)
constants = dict(ROWS=20, FEATURES=32, INPUTS=64, ROW_BLOCK=16, FEATURE_BLOCK=16, INPUT_BLOCK=32)
product_gelu_triton.product_gelu[(2, 2, 1)](x, weight, bias, out, **constants)
expected = OPERATOR(x.float(), weight.float(), bias.float(), "")
torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)

for rows in (20, 1, 16, 70):  # groups of two blocks of rows, of which the last is not full; more tiles than blocks
    x = torch.randn(rows, 64).half()
    out = torch.full((rows, 32), float("nan"), dtype=torch.float16)
    constants = dict(FEATURES=32, INPUTS=64, ROW_BLOCK=16, FEATURE_BLOCK=16, INPUT_BLOCK=32, GROUP=2)
    product_gelu_triton.product_gelu_many[(3, 1, 1)](x, weight, bias, out, rows, **constants)
    expected = OPERATOR(x.float(), weight.float(), bias.float(), "")
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
print("equal")
"""

_GELU = """
import torch
import triton
import triton.language as tl
from torch.nn import functional
from nimble_jobs.kernels import product_gelu_triton


@triton.jit
def each(x, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, product_gelu_triton.gelu(tl.load(x + place)))


special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30, -1e-30, 3e38, -3e38, 1e4, -1e4])
x = torch.cat([special, torch.linspace(-14, 14, 4096 - len(special))])
out = torch.empty_like(x)
each[(1,)](x, out, SIZE=4096)
torch.testing.assert_close(out, functional.gelu(x.double()).float(), rtol=0, atol=1e-6, equal_nan=True)
print("equal")
"""


def test_the_kernel_computes_what_the_operator_does() -> None:
    """By Triton's interpreter, which has to be asked for before Triton is imported."""
    interpreted(_INTERPRETED)


def test_the_short_gelu_is_the_exact_one() -> None:
    """To a millionth in absolute terms; also of infinities and of what is no number."""
    interpreted(_GELU)
