"""Scaled dot-product attention in Triton. Imported only when kernels are compiled. Sums are in fp32.

The softmax is summed up over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl


@triton.jit
def attention(
    q,
    k,
    v,
    mask,
    out,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    Q_BATCH: tl.constexpr,
    Q_HEAD: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_BATCH: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_ROW: tl.constexpr,
    V_BATCH: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_ROW: tl.constexpr,
    MASK: tl.constexpr,
    M_BATCH: tl.constexpr,
    M_HEAD: tl.constexpr,
    M_ROW: tl.constexpr,
    M_KEY: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """q [batch, heads, rows, dim], k and v [batch, heads, keys, dim] with the given strides and a last one of 1; out
    [batch, rows, heads, dim] without gaps. MASK: 0 none, 1 where true, 2 added to the scores.

    A row that may look at no key gets zeros, as in torch.
    """
    batch = (tl.program_id(1) // HEADS).to(tl.int64)  # of large batches, places need more than 32 bits
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    row = tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    row_exists = (row < ROWS)[:, None]
    dim_exists = (dim < DIM)[None, :]
    own = tl.load(
        q + batch * Q_BATCH + head * Q_HEAD + row[:, None] * Q_ROW + dim[None, :],
        mask=row_exists & dim_exists,
        other=0.0,
    )
    largest = tl.full((ROW_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((ROW_BLOCK,), tl.float32)
    mixed = tl.zeros((ROW_BLOCK, DIM_BLOCK), tl.float32)
    for start in range(0, KEYS, KEY_BLOCK):
        key = start + tl.arange(0, KEY_BLOCK)
        exist = (key < KEYS)[:, None] & dim_exists
        theirs = tl.load(
            k + batch * K_BATCH + head * K_HEAD + key[:, None] * K_ROW + dim[None, :], mask=exist, other=0.0
        )
        values = tl.load(
            v + batch * V_BATCH + head * V_HEAD + key[:, None] * V_ROW + dim[None, :], mask=exist, other=0.0
        )
        score = tl.dot(own, tl.trans(theirs)) * (SCALE * 1.4426950408889634)  # for powers of two instead of e
        visible = (key < KEYS)[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        if MASK != 0:
            place = mask + batch * M_BATCH + head * M_HEAD + row[:, None] * M_ROW + key[None, :] * M_KEY
            given = tl.load(place, mask=row_exists & (key < KEYS)[None, :], other=0)
            if MASK == 1:
                visible = visible & (given != 0)
            else:
                # bf16's lowest finite number has to stay finite: a row of nothing else gets the mean of all values.
                given = given.to(tl.float32)
                lowest = tl.maximum(given * 1.4426950408889634, -3.4028234e38)
                score += tl.where(given == float("-inf"), given, lowest)
        score = tl.where(visible, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(values.dtype), values, mixed * shrink[:, None])
        largest = larger
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + ((batch * ROWS + row[:, None]) * HEADS + head) * DIM + dim[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=row_exists & dim_exists)
