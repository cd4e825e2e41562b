"""A matrix product with bias and GELU in Triton. Imported only when kernels are compiled. Sums are in fp32."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl


@triton.jit
def gelu(x):
    """x times the normal distribution function of x, to 5e-7 in absolute terms: Abramowitz and Stegun, 7.1.26, in half
    the instructions of a GELU with Triton's own error function.
    """
    size = tl.abs(x)
    shifted = 1.0 + size * 0.2316418882663604
    t = tl.rsqrt(shifted * shifted)  # 1 / shifted: a division takes care of numbers that do not occur here
    tail = 0.5307027145 * t - 0.7265760135
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = tail * t + 0.127414796
    tail = tail * t * tl.exp2(size * size * -0.7213475204444817)  # the distribution function of -size
    return x * tl.where(x > 0.0, 1.0 - tail, tail)


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
    tl.store(out + row[:, None] * FEATURES + feature[None, :], gelu(total).to(out.dtype.element_ty), mask=exist)


@triton.jit
def product_gelu_many(
    x,
    weight,
    bias,
    out,
    rows,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The same for many rows: a block computes one tile after another, and tensor descriptors (TMA) move the data.

    Tiles go over a group of blocks of rows first, so that what is read lies in the cache.
    """
    row_blocks = tl.cdiv(rows, ROW_BLOCK)
    in_group = GROUP * (FEATURES // FEATURE_BLOCK)
    values = tl.make_tensor_descriptor(x, [rows, INPUTS], [INPUTS, 1], [ROW_BLOCK, INPUT_BLOCK])
    factors = tl.make_tensor_descriptor(weight, [FEATURES, INPUTS], [INPUTS, 1], [FEATURE_BLOCK, INPUT_BLOCK])
    made = tl.make_tensor_descriptor(out, [rows, FEATURES], [FEATURES, 1], [ROW_BLOCK, FEATURE_BLOCK // 2])
    for tile in tl.range(tl.program_id(0), row_blocks * (FEATURES // FEATURE_BLOCK), tl.num_programs(0), flatten=True):
        first = tile // in_group * GROUP
        size = tl.minimum(row_blocks - first, GROUP)
        row = (first + tile % in_group % size) * ROW_BLOCK
        feature = tile % in_group // size * FEATURE_BLOCK
        total = tl.zeros((ROW_BLOCK, FEATURE_BLOCK), tl.float32)
        for start in range(0, INPUTS, INPUT_BLOCK):
            factor = factors.load([feature, start])
            total = tl.dot(values.load([row, start]), factor.T, total)
        total += tl.load(bias + feature + tl.arange(0, FEATURE_BLOCK)).to(tl.float32)[None, :]
        halves = tl.permute(tl.reshape(total, (ROW_BLOCK, 2, FEATURE_BLOCK // 2)), (0, 2, 1))
        left, right = tl.split(halves)  # two stores need half of the shared memory
        made.store([row, feature], gelu(left).to(out.dtype.element_ty))
        made.store([row, feature + FEATURE_BLOCK // 2], gelu(right).to(out.dtype.element_ty))
