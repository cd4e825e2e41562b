"""Depthwise convolution in Triton, for both memory formats. Imported only when kernels are compiled.

Sums are in fp32 for every tensor type. Sizes are arguments, so one binary serves many layers. `UNIT` divides the number
of channels, which lets the compiler load that many values at once.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl

SIZES = ("units", "height", "width", "out_height", "out_width", "places", "stride", "padding", "dilation")


@triton.jit(do_not_specialize=SIZES)
def depthwise_channels_last(
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
    CHANNELS: tl.constexpr,
):
    """A block of output places times a block of channels."""
    channels = units * UNIT
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = place % out_width
    row = place // out_width
    image = row // out_height
    row = row % out_height
    within = channel < channels
    total = tl.zeros((PLACES, CHANNELS), tl.float32)
    for i in tl.static_range(KERNEL):
        y = row * stride - padding + i * dilation
        for j in tl.static_range(KERNEL):
            z = column * stride - padding + j * dilation
            inside = (place < places) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            start = ((image * height + y) * width + z) * channels
            value = tl.load(x + start[:, None] + channel[None, :], mask=inside[:, None] & within[None, :], other=0.0)
            factor = tl.load(weight + channel * (KERNEL * KERNEL) + (i * KERNEL + j), mask=within, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
    where = place[:, None] * channels + channel[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(place < places)[:, None] & within[None, :])


@triton.jit(do_not_specialize=SIZES)
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
    CHANNELS: tl.constexpr,
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
