"""A dilated convolution whose sum is taken in several parts, in Triton. Imported only when kernels are compiled."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl


@triton.jit
def dilated(
    x,
    weight,
    out,
    IMAGES: tl.constexpr,
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
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    FIRST_0: tl.constexpr,
    WIDTH_0: tl.constexpr,
    FIRST_1: tl.constexpr,
    WIDTH_1: tl.constexpr,
    FIRST_2: tl.constexpr,
    WIDTH_2: tl.constexpr,
    PARTS: tl.constexpr,
    PIXEL_BLOCK: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    """x [images, height, width, channels], weight [features, kernel height, kernel width, channels], out [parts, pixels
    of all images, features] in fp32.

    A tile takes pixels of the result from one of three bands of columns, each given by its first column and its width;
    `bands` says why, and which taps it reads: all that are inside of the picture for any of its pixels. The parts share
    the blocks of channels of these taps as evenly as whole blocks can be.
    """
    tile = tl.program_id(0)
    feature = tl.program_id(1) * FEATURE_BLOCK + tl.arange(0, FEATURE_BLOCK)
    part = tl.program_id(2)
    second: tl.constexpr = (IMAGES * OUT_HEIGHT * WIDTH_0 + PIXEL_BLOCK - 1) // PIXEL_BLOCK  # the band's first tile
    third: tl.constexpr = second + (IMAGES * OUT_HEIGHT * WIDTH_1 + PIXEL_BLOCK - 1) // PIXEL_BLOCK
    left = tl.where(tile >= third, FIRST_2, tl.where(tile >= second, FIRST_1, FIRST_0))
    width = tl.where(tile >= third, WIDTH_2, tl.where(tile >= second, WIDTH_1, WIDTH_0))
    start = (tile - tl.where(tile >= third, third, tl.where(tile >= second, second, 0))) * PIXEL_BLOCK
    count = IMAGES * OUT_HEIGHT * width

    # As `bands.Axis.taps`.
    first = start // width  # line of the results of all images
    last = (tl.minimum(start + PIXEL_BLOCK, count) - 1) // width
    alone = first // OUT_HEIGHT == last // OUT_HEIGHT  # in one image
    first = tl.where(alone, first % OUT_HEIGHT, 0)
    last = tl.where(alone, last % OUT_HEIGHT, OUT_HEIGHT - 1)
    top = tl.maximum(0, PADDING_Y - last * STRIDE_Y + DILATION_Y - 1) // DILATION_Y
    rows = tl.maximum(0, HEIGHT - 1 + PADDING_Y - first * STRIDE_Y + DILATION_Y) // DILATION_Y
    rows = tl.maximum(0, tl.minimum(KERNEL_HEIGHT, rows) - top)
    side = tl.maximum(0, PADDING_X - (left + width - 1) * STRIDE_X + DILATION_X - 1) // DILATION_X
    columns = tl.maximum(0, WIDTH - 1 + PADDING_X - left * STRIDE_X + DILATION_X) // DILATION_X
    columns = tl.maximum(0, tl.minimum(KERNEL_WIDTH, columns) - side)

    number = start + tl.arange(0, PIXEL_BLOCK)
    exist = (number < count)[:, None]
    wanted = (feature < FEATURES)[None, :]
    line = number // width
    column = left + number % width
    upper = line % OUT_HEIGHT * STRIDE_Y - PADDING_Y
    leftmost = column * STRIDE_X - PADDING_X
    picture = line // OUT_HEIGHT * HEIGHT
    blocks: tl.constexpr = CHANNELS // CHANNEL_BLOCK
    steps = rows * columns * blocks
    begin = part * steps // PARTS
    across_taps = tl.maximum(columns, 1)  # to divide by
    total = tl.zeros((PIXEL_BLOCK, FEATURE_BLOCK), tl.float32)
    for step in range((part + 1) * steps // PARTS - begin):
        block = begin + step
        tap_y = top + block // blocks // across_taps
        tap_x = side + block // blocks % across_taps
        channel = block % blocks * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
        y = upper + tap_y * DILATION_Y
        across = leftmost + tap_x * DILATION_X
        inside = ((y >= 0) & (y < HEIGHT) & (across >= 0) & (across < WIDTH))[:, None]
        place = ((picture + y) * WIDTH + across)[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + place, mask=exist & inside, other=0.0)
        place = feature[None, :] * (KERNEL_HEIGHT * KERNEL_WIDTH * CHANNELS)
        place += ((tap_y * KERNEL_WIDTH + tap_x) * CHANNELS + channel)[:, None]
        total = tl.dot(value, tl.load(weight + place, mask=wanted, other=0.0), total)
    place = (part * (IMAGES * OUT_HEIGHT * OUT_WIDTH) + (line * OUT_WIDTH + column)[:, None]) * FEATURES
    tl.store(out + place + feature[None, :], total, mask=exist & wanted)
