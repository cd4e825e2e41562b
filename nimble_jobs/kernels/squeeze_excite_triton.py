"""Squeeze-and-excitation in two Triton kernels, over channels-last images. Imported only when kernels are compiled.

The first averages its part of the pixels over its channels, and multiplies that by its columns of the first layer's
weight: a share of the hidden layer's sum. The second adds the shares, computes the gates of its channels, and scales
them. Neither waits for another block, and sums are in fp32 in a fixed order. All sizes are constants.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl

from nimble_jobs.kernels.activations_triton import activated


@triton.jit
def squeeze(
    x,
    weight,
    out,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [images, pixels, channels], weight [hidden, channels], out [images, blocks of channels * shares, hidden]."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = tl.program_id(2)
    first = tl.program_id(1) * SHARE
    end = tl.minimum(first + SHARE, PIXELS)
    within = channel < CHANNELS
    total = tl.zeros((PLACES, BLOCK), tl.float32)
    for start in range(0, SHARE, PLACES):
        place = first + start + tl.arange(0, PLACES)
        where = (image * PIXELS + place)[:, None] * CHANNELS + channel[None, :]
        total += tl.load(x + where, mask=(place < end)[:, None] & within[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) * (1.0 / PIXELS)
    hidden = tl.arange(0, HIDDEN_BLOCK)
    inside = (hidden < HIDDEN)[:, None] & within[None, :]
    factor = tl.load(weight + hidden[:, None] * CHANNELS + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    slot = (image * tl.num_programs(0) + tl.program_id(0)) * SHARES + tl.program_id(1)
    tl.store(out + slot * HIDDEN + hidden, tl.sum(factor * mean[None, :], 1), mask=hidden < HIDDEN)


@triton.jit
def excite(
    x,
    parts,
    bias,
    weight,
    gate_bias,
    out,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    SIGMOID: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x and out [images, pixels, channels], parts [images, PARTS, hidden], weight [channels, hidden]."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = tl.program_id(2)
    within = channel < CHANNELS
    hidden = tl.arange(0, HIDDEN_BLOCK)
    known = hidden < HIDDEN
    total = tl.zeros((ROWS, HIDDEN_BLOCK), tl.float32)
    for start in range(0, PARTS, ROWS):
        row = start + tl.arange(0, ROWS)
        where = (image * PARTS + row)[:, None] * HIDDEN + hidden[None, :]
        total += tl.load(parts + where, mask=(row < PARTS)[:, None] & known[None, :], other=0.0)
    value = tl.sum(total, 0) + tl.load(bias + hidden, mask=known, other=0.0).to(tl.float32)
    value = activated(value, 2 if SILU else 0)
    inside = within[:, None] & known[None, :]
    factor = tl.load(weight + channel[:, None] * HIDDEN + hidden[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.sum(factor * value[None, :], 1) + tl.load(gate_bias + channel, mask=within, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate) if SIGMOID else activated(gate + 3.0, 1) * (1.0 / 6.0)
    first = tl.program_id(1) * SHARE
    end = tl.minimum(first + SHARE, PIXELS)
    for start in range(0, SHARE, PLACES):
        place = first + start + tl.arange(0, PLACES)
        some = (place < end)[:, None] & within[None, :]
        where = (image * PIXELS + place)[:, None] * CHANNELS + channel[None, :]
        scaled = tl.load(x + where, mask=some, other=0.0).to(tl.float32) * gate[None, :]
        tl.store(out + where, scaled.to(out.dtype.element_ty), mask=some)
