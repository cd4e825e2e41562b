"""Depthwise convolution in Triton, for both memory formats. Imported only when kernels are compiled.

Sums are in fp32 for every tensor type. Sizes are arguments, so one binary serves many layers. `UNIT` divides the number
of channels, which lets the compiler load that many values at once.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl

from nimble_jobs.kernels.activations_triton import activated

SIZES = ("units", "height", "width", "out_height", "out_width", "places", "stride", "padding", "dilation")


@triton.jit
def _sums(
    x,
    weight,
    channels,
    height,
    width,
    out_height,
    out_width,
    places,
    stride,
    padding,
    dilation,
    KERNEL: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The sums of a block of output places times a block of channels, with where they belong, and which exist."""
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
    return total, place[:, None] * channels + channel[None, :], (place < places)[:, None] & within[None, :]


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
    total, where, exist = _sums(
        x,
        weight,
        channels,
        height,
        width,
        out_height,
        out_width,
        places,
        stride,
        padding,
        dilation,
        KERNEL,
        PLACES,
        CHANNELS,
    )
    tl.store(out + where, total.to(out.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=SIZES)
def depthwise_activated(
    x,
    weight,
    bias,
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
    ACTIVATION: tl.constexpr,
):
    """The same, with bias and activation, by its number."""
    channels = units * UNIT
    total, where, exist = _sums(
        x,
        weight,
        channels,
        height,
        width,
        out_height,
        out_width,
        places,
        stride,
        padding,
        dilation,
        KERNEL,
        PLACES,
        CHANNELS,
    )
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=exist)


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
