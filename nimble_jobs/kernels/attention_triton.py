"""Scaled dot-product attention in Triton. Imported only when kernels are compiled. Sums are in fp32.

The softmax is summed up over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl


@triton.jit
def _taken_in(
    own,
    k,
    v,
    mask,
    row,
    start,
    largest,
    total,
    mixed,
    FACTOR: tl.constexpr,
    FOLDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    MASK: tl.constexpr,
    M_ROW: tl.constexpr,
    M_KEY: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of a block of rows once a block of keys, from `start`, is added to them.

    `k`, `v` and `mask` begin at this head. `largest` is in units of the exponent, whose base is two. CHECKED: the block
    may hold keys that do not exist.
    """
    key = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    exist = (dim < DIM)[None, :]
    if CHECKED:
        exist = (key < KEYS)[:, None] & exist
    theirs = tl.load(k + key[:, None] * K_ROW + dim[None, :], mask=exist, other=0.0)
    values = tl.load(v + key[:, None] * V_ROW + dim[None, :], mask=exist, other=0.0)
    score = tl.dot(own, tl.trans(theirs))
    if not FOLDED:
        score *= FACTOR
    if MASK != 0:
        if M_ROW == 0:  # the same for all rows
            given = tl.load(mask + key * M_KEY, mask=key < KEYS, other=0)[None, :]
        else:
            known = (row < ROWS)[:, None]
            if CHECKED:
                known = known & (key < KEYS)[None, :]
            given = tl.load(mask + row[:, None] * M_ROW + key[None, :] * M_KEY, mask=known, other=0)
        if MASK == 1:
            score = tl.where(given != 0, score, float("-inf"))
        elif mask.dtype.element_ty == tl.float16:
            score += given.to(tl.float32) * 1.4426950408889634
        else:
            # bf16's lowest finite number has to stay finite: a row of nothing else gets the mean of all values.
            given = given.to(tl.float32)
            lowest = tl.maximum(given * 1.4426950408889634, -3.4028234e38)
            score += tl.where(given == float("-inf"), given, lowest)
    if CAUSAL:
        score = tl.where(key[None, :] <= row[:, None], score, float("-inf"))
    if CHECKED:
        score = tl.where((key < KEYS)[None, :], score, float("-inf"))
    largest_here = tl.max(score, 1)
    if FOLDED:
        largest_here *= FACTOR
    larger = tl.maximum(largest, largest_here)
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    if FOLDED:
        score *= FACTOR  # the compiler makes one fused multiply-add of this and the difference
    weight = tl.exp2(score - finite[:, None])
    shrink = tl.exp2(largest - finite)
    total = total * shrink + tl.sum(weight, 1)
    mixed = tl.dot(weight.to(values.dtype), values, mixed * shrink[:, None])
    return larger, total, mixed


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
    FOLDED: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """q [batch, heads, rows, dim], k and v [batch, heads, keys, dim] with the given strides and a last one of 1; out
    [batch, rows, heads, dim] without gaps. MASK: 0 none, 1 where true, 2 added to the scores.

    FOLDED: scores are scaled within the exponent; see `attention.folds`. With a REST_BLOCK the keys beyond the last
    whole block are one of that size, and whole blocks are not checked. It comes first: its keys arrive with the
    queries. A row that may look at no key gets zeros, as in torch.
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
    k += batch * K_BATCH + head * K_HEAD
    v += batch * V_BATCH + head * V_HEAD
    mask += batch * M_BATCH + head * M_HEAD
    end = KEYS
    if REST_BLOCK > 0:
        end = KEYS - KEYS % KEY_BLOCK
        largest, total, mixed = _taken_in(
            own,
            k,
            v,
            mask,
            row,
            KEYS - KEYS % KEY_BLOCK,
            largest,
            total,
            mixed,
            FACTOR=SCALE * 1.4426950408889634,
            FOLDED=FOLDED,
            ROWS=ROWS,
            KEYS=KEYS,
            DIM=DIM,
            DIM_BLOCK=DIM_BLOCK,
            K_ROW=K_ROW,
            V_ROW=V_ROW,
            MASK=MASK,
            M_ROW=M_ROW,
            M_KEY=M_KEY,
            CAUSAL=CAUSAL,
            CHECKED=KEYS % KEY_BLOCK != REST_BLOCK,
            BLOCK=REST_BLOCK,
        )
    if CAUSAL:  # no row of this block may look beyond its last
        end = tl.minimum(end, (tl.program_id(0) + 1) * ROW_BLOCK)
    for start in range(0, end, KEY_BLOCK):
        largest, total, mixed = _taken_in(
            own,
            k,
            v,
            mask,
            row,
            start,
            largest,
            total,
            mixed,
            FACTOR=SCALE * 1.4426950408889634,
            FOLDED=FOLDED,
            ROWS=ROWS,
            KEYS=KEYS,
            DIM=DIM,
            DIM_BLOCK=DIM_BLOCK,
            K_ROW=K_ROW,
            V_ROW=V_ROW,
            MASK=MASK,
            M_ROW=M_ROW,
            M_KEY=M_KEY,
            CAUSAL=CAUSAL,
            CHECKED=KEYS % KEY_BLOCK != 0 and REST_BLOCK == 0,
            BLOCK=KEY_BLOCK,
        )
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + ((batch * ROWS + row[:, None]) * HEADS + head) * DIM + dim[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=row_exists & dim_exists)
