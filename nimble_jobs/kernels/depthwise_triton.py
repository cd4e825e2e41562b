"""Depthwise convolution in Triton, for both memory formats. Imported only when kernels are compiled.

Sums are in fp32 for every tensor type. Sizes are arguments, so one binary serves many layers. `UNIT` divides the number
of channels, which lets the compiler load that many values at once.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803, RUF005  # Triton's convention for compile-time constants; it unpacks no tuples
import triton
import triton.language as tl

from nimble_jobs.kernels.activations_triton import activated

SIZES_CHANNELS_LAST = ("units", "height", "width", "out_height", "out_width", "patches", "padding")
SIZES_CONTIGUOUS = ("units", "height", "width", "out_height", "out_width", "places", "stride", "padding", "dilation")


@triton.jit(do_not_specialize=SIZES_CHANNELS_LAST)
def depthwise_channels_last(
    x,
    weight,
    bias,
    out,
    units,
    height,
    width,
    out_height,
    out_width,
    patches,
    padding,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PATCHES: tl.constexpr,
    CHANNELS: tl.constexpr,
    READ: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """A block of patches times a block of channels. A patch is so many columns of one output row: a value that is read
    serves each of them whose window it lies in, and so does a weight. The bits of READ say which columns of the input,
    counted from the first window's left edge, lie in any window.

    With BIASED, bias and activation, by its number, follow. The code is unrolled over ROWS_AT_ONCE rows of a window.
    """
    channels = units * UNIT
    across = tl.cdiv(out_width, COLUMNS)
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    line = patch // across
    column = (patch % across * COLUMNS)[:, None]
    image = (line // out_height)[:, None]
    top = (line % out_height * STRIDE - padding)[:, None]
    left = column * STRIDE - padding
    within = channel < channels
    exist = (patch < patches)[:, None] & within[None, :]
    totals = ()  # Triton has no lists
    for _ in tl.static_range(COLUMNS):
        totals = totals + (tl.zeros((PATCHES, CHANNELS), tl.float32),)
    for i in tl.range(KERNEL, num_stages=1, loop_unroll_factor=ROWS_AT_ONCE):
        y = top + i * DILATION
        there = exist & (y >= 0) & (y < height)
        start = x + (((image * height + y) * width + left) * channels + channel[None, :])
        values = ()
        for j in tl.static_range((COLUMNS - 1) * STRIDE + (KERNEL - 1) * DILATION + 1):
            if READ >> j & 1:
                inside = there & (left + j >= 0) & (left + j < width)
                values = values + (tl.load(start + j * channels, mask=inside, other=0.0).to(tl.float32),)
            else:
                values = values + (there,)  # stands for what nobody reads
        factors = ()
        for j in tl.static_range(KERNEL):
            factor = tl.load(weight + channel * (KERNEL * KERNEL) + (i * KERNEL + j), mask=within, other=0.0)
            factors = factors + (factor.to(tl.float32)[None, :],)
        sums = ()
        for c in tl.static_range(COLUMNS):
            total = totals[c]
            for j in tl.static_range(KERNEL):
                total += values[c * STRIDE + j * DILATION] * factors[j]
            sums = sums + (total,)
        totals = sums
    if BIASED:
        term = tl.load(bias + channel, mask=within, other=0.0).to(tl.float32)[None, :]
    where = out + ((line[:, None] * out_width + column) * channels + channel[None, :])
    for c in tl.static_range(COLUMNS):
        total = totals[c]
        if BIASED:
            total = activated(total + term, ACTIVATION)
        tl.store(where + c * channels, total.to(out.dtype.element_ty), mask=exist & (column + c < out_width))


@triton.jit(do_not_specialize=SIZES_CONTIGUOUS)
def depthwise_contiguous(
    x,
    weight,
    out,
    units,
    height,
    width,
    out_height,
    out_width,
    places,
    stride,
    padding,
    dilation,
    KERNEL: tl.constexpr,
    UNIT: tl.constexpr,
    PLACES: tl.constexpr,
):
    """A block of output places, counted through all channels and images."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    column = place % out_width
    row = place // out_width
    plane = row // out_height
    row = row % out_height
    channel = plane % (units * UNIT)
    total = tl.zeros((PLACES,), tl.float32)
    for i in tl.static_range(KERNEL):
        y = row * stride - padding + i * dilation
        for j in tl.static_range(KERNEL):
            z = column * stride - padding + j * dilation
            inside = (place < places) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            value = tl.load(x + (plane * height + y) * width + z, mask=inside, other=0.0)
            factor = tl.load(weight + channel * (KERNEL * KERNEL) + (i * KERNEL + j), mask=place < places, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < places)
