"""A pointwise convolution in Triton: a product of pixels with weights. Imported only when kernels are compiled.

Sums are in fp32. Sizes are arguments, so one binary serves many layers. `UNIT` divides the numbers of channels, which
lets the compiler load that many values at once.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl

from nimble_jobs.kernels.activations_triton import activated

SIZES = ("pixels", "input_units", "feature_units", "height", "width")


@triton.jit(do_not_specialize=SIZES)
def pointwise(
    x,
    weight,
    bias,
    other,
    out,
    pixels,
    input_units,
    feature_units,
    height,
    width,
    UNIT: tl.constexpr,
    PIXEL_BLOCK: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """x [pixels, inputs], weight [features, inputs], out and, with ADDED, other [pixels, features].

    With a STRIDE above 1, x are images [height, width, inputs], of which every so many rows and columns are read.
    """
    inputs = input_units * UNIT
    features = feature_units * UNIT
    pixel = tl.program_id(0) * PIXEL_BLOCK + tl.arange(0, PIXEL_BLOCK)
    feature = tl.program_id(1) * FEATURE_BLOCK + tl.arange(0, FEATURE_BLOCK)
    exist = (pixel < pixels)[:, None]
    place_in_x = pixel
    if STRIDE > 1:
        across = tl.cdiv(width, STRIDE)
        line = pixel // across
        down = tl.cdiv(height, STRIDE)
        row = line // down * height + line % down * STRIDE
        place_in_x = row * width + pixel % across * STRIDE
    wanted = feature < features
    total = tl.zeros((PIXEL_BLOCK, FEATURE_BLOCK), tl.float32)
    for start in range(0, inputs, INPUT_BLOCK):
        place = start + tl.arange(0, INPUT_BLOCK)
        within = place < inputs
        value = tl.load(x + place_in_x[:, None] * inputs + place[None, :], mask=exist & within[None, :], other=0.0)
        where = feature[None, :] * inputs + place[:, None]
        total = tl.dot(value, tl.load(weight + where, mask=wanted[None, :] & within[:, None], other=0.0), total)
    if BIASED:
        total += tl.load(bias + feature, mask=wanted, other=0.0).to(tl.float32)[None, :]
    where = pixel[:, None] * features + feature[None, :]
    if ADDED:
        total += tl.load(other + where, mask=exist & wanted[None, :], other=0.0).to(tl.float32)
    total = activated(total, ACTIVATION)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=exist & wanted[None, :])
