"""A depthwise-separable convolution in Triton: sums over a window for each channel, then a product over all channels.

Imported only when kernels are compiled. Sums, biases and activations are in fp32; what lies between the two is rounded
once, after them. Sizes are arguments, so one binary serves many layers. `UNIT` divides the numbers of channels, which
lets the compiler load that many values at once.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803  # Triton's convention for compile-time constants
import triton
import triton.language as tl

from nimble_jobs.kernels.activations_triton import activated

SIZES = (
    *("input_units", "feature_units", "height", "width", "out_height", "out_width"),
    *("places", "stride", "padding", "dilation"),
)


@triton.jit(do_not_specialize=SIZES)
def separable(
    x,
    depth_weight,
    depth_bias,
    weight,
    bias,
    other,
    out,
    input_units,
    feature_units,
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
    PLACE_BLOCK: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    RECTIFIED: tl.constexpr,
    DEPTH_BIAS: tl.constexpr,
    BETWEEN: tl.constexpr,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """A block of output places times a block of features: x [images, height, width, inputs], depth_weight [inputs,
    KERNEL, KERNEL], weight [features, inputs], out and, with ADDED, other [places, features].

    With RECTIFIED the convolution is over the ReLU of x. BETWEEN and ACTIVATION are numbers of activations. The loop
    over a window's rows stays one: unrolled, the compiler needs seconds, and registers for more values than there are.
    """
    inputs = input_units * UNIT
    features = feature_units * UNIT
    place = tl.program_id(0) * PLACE_BLOCK + tl.arange(0, PLACE_BLOCK)
    feature = tl.program_id(1) * FEATURE_BLOCK + tl.arange(0, FEATURE_BLOCK)
    column = place % out_width
    row = place // out_width
    image = row // out_height
    row = row % out_height
    wanted = feature < features
    total = tl.zeros((PLACE_BLOCK, FEATURE_BLOCK), tl.float32)
    for start in range(0, inputs, INPUT_BLOCK):
        channel = start + tl.arange(0, INPUT_BLOCK)
        within = channel < inputs
        where = feature[None, :] * inputs + channel[:, None]
        product = tl.load(weight + where, mask=wanted[None, :] & within[:, None], other=0.0)  # arrives meanwhile
        depth = tl.zeros((PLACE_BLOCK, INPUT_BLOCK), tl.float32)
        for i in tl.range(KERNEL, num_stages=1, loop_unroll_factor=1):
            y = row * stride - padding + i * dilation
            for j in tl.static_range(KERNEL):
                z = column * stride - padding + j * dilation
                inside = (place < places) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
                pixel = ((image * height + y) * width + z) * inputs
                value = tl.load(
                    x + pixel[:, None] + channel[None, :], mask=inside[:, None] & within[None, :], other=0.0
                )
                value = value.to(tl.float32)
                if RECTIFIED:
                    value = activated(value, 0)
                factor = tl.load(depth_weight + channel * (KERNEL * KERNEL) + (i * KERNEL + j), mask=within, other=0.0)
                depth += value * factor.to(tl.float32)[None, :]
        if DEPTH_BIAS:
            depth += tl.load(depth_bias + channel, mask=within, other=0.0).to(tl.float32)[None, :]
        depth = activated(depth, BETWEEN)
        total = tl.dot(depth.to(product.dtype), product, total)
    total += tl.load(bias + feature, mask=wanted, other=0.0).to(tl.float32)[None, :]
    where = place[:, None] * features + feature[None, :]
    exist = (place < places)[:, None] & wanted[None, :]
    if ADDED:
        total += tl.load(other + where, mask=exist, other=0.0).to(tl.float32)
    total = activated(total, ACTIVATION)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=exist)
