"""Our attention against fp64, and its choice."""

from __future__ import annotations

import pytest
import torch

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.kernels import attention_pass
from nimble_jobs.kernels.attention import TILES, Mask, Shape, Strides, compiled, outer_strides
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.kernels.static_triton import capability_of


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("mask", "causal"), [("none", False), ("true", False), ("added", True)])
@pytest.mark.parametrize(
    ("rows", "keys", "dim"), [(128, 128, 64), (197, 197, 64), (5, 300, 32), (64, 77, 80), (70, 20, 16)]
)
def test_the_kernel_agrees_with_fp64(
    kind: str, tile: str, mask: Mask, causal: bool, rows: int, keys: int, dim: int, device: torch.device
) -> None:
    """Also where the last blocks of rows and keys are not full, and where a row may look at nothing."""
    torch.manual_seed(0)
    q = torch.randn(2, rows, 3, dim, device=device).to(dtype(kind)).transpose(1, 2)
    k, v = torch.randn(2, keys, 2, 3, dim, device=device).to(dtype(kind)).transpose(1, 3).unbind(2)
    scores = dim**-0.5 * q.double() @ k.double().transpose(2, 3)
    given, strides = None, (0, 0, 0, 0)
    if mask != "none":
        several = rows if mask == "added" else 1  # another mask for each row, or one for all
        given = torch.rand(2, 1, several, keys, device=device) < 0.5
        strides = (several * keys, 0, keys if several > 1 else 0, 1)
        given[1] = False
        scores = scores.masked_fill(~given, float("-inf"))
        if mask == "added":
            given = torch.where(given, 0.0, float("-inf")).to(q.dtype)
    if causal:
        hidden = torch.arange(keys, device=device)[None, :] > torch.arange(rows, device=device)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    exact = (scores.softmax(3).nan_to_num(0.0) @ v.double()).transpose(1, 2)
    shape = Shape(dtype=kind, batch=2, heads=3, rows=rows, keys=keys, dim=dim, mask=mask, causal=causal)
    laid = Strides(q=outer_strides(q.stride()), k=outer_strides(k.stride()), v=outer_strides(v.stride()), mask=strides)
    out = torch.full(exact.shape, float("nan"), dtype=q.dtype, device=device)
    compiled(shape, laid, dim**-0.5, tile, capability_of(device))(q, k, v, q if given is None else given, out)
    assert relative_norm(out, exact) < {"float16": 1e-3, "bfloat16": 1e-2}[kind]


@pytest.mark.parametrize("mask", ["none", "true", "added"])
def test_tiles_are_measured(mask: Mask, device: torch.device) -> None:
    """The library and each tile have a time; the choice is one of them and stays."""
    shape = Shape(dtype="float16", batch=4, heads=12, rows=128, keys=128, dim=64, mask=mask)
    with using(Choices()) as choices:
        chosen = attention_pass.fastest(shape, device)
        assert attention_pass.fastest(shape, device) == chosen
    (made,) = choices.made()
    assert {way for way, _ in made.times.times_us} == {"library", *shape.tiles}
