"""Our linear layer with GELU against fp64, and its choice."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.nn import functional

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import product_gelu_pass
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.product_gelu import TILES_FEW_ROWS, TILES_MANY_ROWS, Shape, compiled
from nimble_jobs.kernels.static_triton import capability_of


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "inputs", "features", "tile"),
    [
        *((*sizes, tile) for tile in TILES_FEW_ROWS for sizes in [(128, 768, 3072), (197, 768, 3072), (1, 384, 1536)]),
        *(
            (*sizes, tile)
            for tile in TILES_MANY_ROWS
            for sizes in [(513, 768, 3072), (12608, 768, 3072), (999, 384, 1536)]
        ),
    ],
)
def test_the_kernel_agrees_with_fp64(
    kind: str, rows: int, inputs: int, features: int, tile: str, device: torch.device
) -> None:
    """Also where the last block of rows is not full."""
    x, weight, bias = (torch.randn(*s, device=device) for s in ((rows, inputs), (features, inputs), (features,)))
    x, weight, bias = (t.to(dtype(kind)) for t in (x, weight * inputs**-0.5, bias))
    exact = functional.gelu(x.double() @ weight.double().t() + bias.double())
    shape = Shape(dtype=kind, rows=rows, features=features, inputs=inputs)
    out = torch.full_like(exact, float("nan"), dtype=x.dtype)
    compiled(shape, tile, capability_of(device))(x, weight, bias, out, *shape.sizes)
    assert relative_norm(out, exact) < {"float16": 1e-3, "bfloat16": 1e-2}[kind]


def test_a_captured_kernel_keeps_its_scratch_memory(device: torch.device) -> None:
    """Replays on two streams at once, each with tensor descriptors of its own, give what one gives alone."""
    shape, tile = Shape(dtype="float16", rows=2048, features=3072, inputs=768), "128x128x64"
    kernel = compiled(shape, tile, capability_of(device))
    assert kernel.scratch_bytes > 0
    weight = (torch.randn(3072, 768, device=device) * 768**-0.5).half()
    bias = torch.randn(3072, device=device).half()
    xs = [torch.randn(2048, 768, device=device).half() for _ in range(2)]
    alone = []
    for x in xs:
        alone.append(torch.full((2048, 3072), float("nan"), device=device, dtype=torch.float16))
        kernel(x, weight, bias, alone[-1], *shape.sizes)
    outs = [torch.full_like(each, float("nan")) for each in alone]
    graphs, streams = [], [torch.cuda.Stream(device) for _ in xs]
    for x, out, stream in zip(xs, outs, streams, strict=True):
        torch.cuda.synchronize(device)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            for _ in range(5):
                kernel(x, weight, bias, out, *shape.sizes)
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize(device)
    assert all(torch.equal(out, each) for out, each in zip(outs, alone, strict=True))

    for out in outs:
        out.fill_(float("nan"))
    torch.cuda.synchronize(device)
    both, (first, second) = torch.cuda.CUDAGraph(), streams
    with torch.cuda.graph(both, stream=first):  # as a plan with two streams
        second.wait_stream(first)
        for _ in range(5):
            for x, out, stream in zip(xs, outs, streams, strict=True):
                with torch.cuda.stream(stream):
                    kernel(x, weight, bias, out, *shape.sizes)
        first.wait_stream(second)
    for _ in range(20):
        both.replay()
    torch.cuda.synchronize(device)
    assert all(torch.equal(out, each) for out, each in zip(outs, alone, strict=True))


@pytest.mark.parametrize(("rows", "tiles"), [(128, TILES_FEW_ROWS), (4096, TILES_MANY_ROWS)])
def test_tiles_are_measured(rows: int, tiles: Mapping[str, object], device: torch.device) -> None:
    """The library and each tile have a time; the choice is one of them and stays."""
    shape = Shape(dtype="float16", rows=rows, features=3072, inputs=768)
    with using(Choices()) as choices:
        chosen = product_gelu_pass.fastest(shape, device)
        assert product_gelu_pass.fastest(shape, device) == chosen
    (made,) = choices.made()
    assert {way for way, _ in made.times.times_us} == {"library", *tiles}
