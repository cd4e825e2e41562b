"""A convolution whose sum is taken in several parts, in Triton. Imported only when kernels are compiled."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl


@triton.jit
def split_k(
    x,
    weight,
    out,
    PIXELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    FEATURES: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PADDING_Y: tl.constexpr,
    PADDING_X: tl.constexpr,
    STEPS: tl.constexpr,
    PIXEL_BLOCK: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x [images, height, width, channels], weight [features, kernel height, kernel width, channels], out [parts, pixels
    of all images, features] in fp32. A part is a sum over STEPS blocks of channels; the parts share all of them evenly.

    With ROWS a block is a whole row of the window, with the channels of all its pixels: they lie side by side in x.
    """
    pixel = tl.program_id(0) * PIXEL_BLOCK + tl.arange(0, PIXEL_BLOCK)
    feature = tl.program_id(1) * FEATURE_BLOCK + tl.arange(0, FEATURE_BLOCK)
    part = tl.program_id(2)
    image = pixel // (OUT_HEIGHT * OUT_WIDTH)
    top = pixel % (OUT_HEIGHT * OUT_WIDTH) // OUT_WIDTH * STRIDE_Y - PADDING_Y
    left = pixel % OUT_WIDTH * STRIDE_X - PADDING_X
    exist = (pixel < PIXELS)[:, None]
    wanted = (feature < FEATURES)[None, :]
    total = tl.zeros((PIXEL_BLOCK, FEATURE_BLOCK), tl.float32)
    for step in range(STEPS):
        block = part * STEPS + step
        if ROWS:
            beside = tl.arange(0, CHANNEL_BLOCK)
            exists = beside < KERNEL_WIDTH * CHANNELS
            y = top + block
            across = left[:, None] + (beside // CHANNELS)[None, :]
            inside = ((y >= 0) & (y < HEIGHT))[:, None] & (across >= 0) & (across < WIDTH) & exists[None, :]
            place = ((image * HEIGHT + y) * WIDTH + left)[:, None] * CHANNELS + beside[None, :]
            value = tl.load(x + place, mask=exist & inside, other=0.0)
            place = feature[None, :] * (KERNEL_HEIGHT * KERNEL_WIDTH * CHANNELS)
            place += (block * KERNEL_WIDTH * CHANNELS + beside)[:, None]
            total = tl.dot(value, tl.load(weight + place, mask=wanted & exists[:, None], other=0.0), total)
        else:
            tap = block // (CHANNELS // CHANNEL_BLOCK)
            channel = block % (CHANNELS // CHANNEL_BLOCK) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
            y = top + tap // KERNEL_WIDTH
            across = left + tap % KERNEL_WIDTH
            inside = ((y >= 0) & (y < HEIGHT) & (across >= 0) & (across < WIDTH))[:, None]
            place = ((image * HEIGHT + y) * WIDTH + across)[:, None] * CHANNELS + channel[None, :]
            value = tl.load(x + place, mask=exist & inside, other=0.0)
            place = feature[None, :] * (KERNEL_HEIGHT * KERNEL_WIDTH * CHANNELS) + (tap * CHANNELS + channel)[:, None]
            total = tl.dot(value, tl.load(weight + place, mask=wanted, other=0.0), total)
    place = (part * PIXELS + pixel[:, None]) * FEATURES + feature[None, :]
    tl.store(out + place, total, mask=exist & wanted)
