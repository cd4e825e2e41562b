"""Our linear layer with GELU against fp64, and its choice."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import product_gelu_pass
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.product_gelu import TILES, Shape, compiled
from nimble_jobs.kernels.static_triton import capability_of


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "inputs", "features"), [(128, 768, 3072), (197, 768, 3072), (1, 384, 1536)])
def test_the_kernel_agrees_with_fp64(
    kind: str, tile: str, rows: int, inputs: int, features: int, device: torch.device
) -> None:
    """Also where the last block of rows is not full."""
    x, weight, bias = (torch.randn(*s, device=device) for s in ((rows, inputs), (features, inputs), (features,)))
    x, weight, bias = (t.to(dtype(kind)) for t in (x, weight * inputs**-0.5, bias))
    exact = functional.gelu(x.double() @ weight.double().t() + bias.double())
    shape = Shape(dtype=kind, rows=rows, features=features, inputs=inputs)
    out = torch.full_like(exact, float("nan"), dtype=x.dtype)
    compiled(shape, tile, capability_of(device))(x, weight, bias, out)
    assert relative_norm(out, exact) < {"float16": 1e-3, "bfloat16": 1e-2}[kind]


def test_tiles_are_measured(device: torch.device) -> None:
    """The library and each tile have a time; the choice is one of them and stays."""
    shape = Shape(dtype="float16", rows=128, features=3072, inputs=768)
    with using(Choices()) as choices:
        chosen = product_gelu_pass.fastest(shape, device)
        assert product_gelu_pass.fastest(shape, device) == chosen
    (made,) = choices.made()
    assert {way for way, _ in made.times.times_us} == {"library", *TILES}
