"""A matrix product with bias and GELU in Triton. Imported only when kernels are compiled. Sums are in fp32."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl


@triton.jit
def product_gelu(
    x,
    weight,
    bias,
    out,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
):
    """x [rows, inputs], weight [features, inputs], out [rows, features]; blocks divide features and inputs."""
    row = tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    feature = tl.program_id(1) * FEATURE_BLOCK + tl.arange(0, FEATURE_BLOCK)
    exist = (row < ROWS)[:, None]
    total = tl.zeros((ROW_BLOCK, FEATURE_BLOCK), tl.float32)
    for start in range(0, INPUTS, INPUT_BLOCK):
        place = start + tl.arange(0, INPUT_BLOCK)
        value = tl.load(x + row[:, None] * INPUTS + place[None, :], mask=exist, other=0.0)
        factor = tl.load(weight + feature[None, :] * INPUTS + place[:, None])
        total = tl.dot(value, factor, total)
    total += tl.load(bias + feature).to(tl.float32)[None, :]
    total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    tl.store(out + row[:, None] * FEATURES + feature[None, :], total.to(out.dtype.element_ty), mask=exist)
