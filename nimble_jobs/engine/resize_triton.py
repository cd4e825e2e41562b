"""Resizes, crops and rounds pictures of any sizes in one Triton launch. Imported only when kernels are compiled.

The weights are those of `resizing.weights`, before they are normalised. Bilinear ones are whole numbers, summed in
float32, and each result is rounded once. Bicubic results are rounded after each pass, as `resizing` says.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803, N806  # Triton's convention for compile-time constants
import triton
import triton.language as tl

from nimble_jobs.engine.blank import BLANK

SIZES = ("height", "width")
_BLANK = tl.constexpr(BLANK)
_LOOKS = tl.constexpr(16)


@triton.jit
def _first(index, old, new, TIMES: tl.constexpr):
    """For each place of the result: the first source pixel with a weight, and the distance of its centre.

    Distances are in units of 1 / (2 new) source pixels: signed whole numbers. Weights reach TIMES the larger size.
    """
    centre = (2 * index.to(tl.int64) + 1) * old
    before = centre - TIMES * tl.maximum(old, new) - new
    first = tl.where(before >= 0, tl.maximum(before, 0) // (2 * new) + 1, 0)  # never divides a negative number
    distance = (2 * first + 1) * new - centre
    return first.to(tl.int32), distance.to(tl.int32)


@triton.jit
def _weight(distance, reach, CUBIC: tl.constexpr):
    distance = tl.abs(distance)
    if CUBIC:
        t = distance.to(tl.float32) / reach.to(tl.float32)
        near = (1.5 * t - 2.5) * t * t + 1.0
        far = ((-0.5 * t + 2.5) * t - 4.0) * t + 2.0
        return tl.where(t < 1.0, near, tl.where(t < 2.0, far, 0.0))
    return tl.maximum(reach - distance, 0).to(tl.float32)


@triton.jit
def _rounded(total, weight):
    return tl.minimum(tl.maximum(tl.floor(tl.div_rn(total, weight) + 0.5), 0.0), 255.0)


@triton.jit
def _looks_blank(source, plane, pitch, height, width, CHANNELS: tl.constexpr):
    """Whether a few values of a picture, evenly spread, are all those of blank memory."""
    values = height * width
    at = tl.arange(0, _LOOKS).to(tl.int64) * (CHANNELS * values - 1) // (_LOOKS - 1)
    looked = tl.load(source + at // values * plane + at % values // width * pitch + at % width)
    return (tl.sum((looked == _BLANK).to(tl.int32), axis=0) == _LOOKS).to(tl.uint8)


@triton.jit(do_not_specialize=SIZES)
def resize_ragged(
    table,
    out,
    flags,
    height,
    width,
    FIELDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    CUBIC: tl.constexpr,
):
    """Writes a block of places of a result [height, width, CHANNELS]. A picture has a line of the table, and a flag."""
    TIMES: tl.constexpr = 4 if CUBIC else 2
    line = table + tl.program_id(1) * FIELDS
    source = tl.load(line).to(tl.pointer_type(tl.uint8))
    plane = tl.load(line + 1)
    pitch = tl.load(line + 2)
    old_height = tl.load(line + 3)
    old_width = tl.load(line + 4)
    new_height = tl.load(line + 5)
    new_width = tl.load(line + 6)
    top = tl.load(line + 7)
    left = tl.load(line + 8)
    target = out + tl.load(line + 9) * height * width * CHANNELS
    if tl.program_id(0) == 0:
        tl.store(flags + tl.program_id(1), _looks_blank(source, plane, pitch, old_height, old_width, CHANNELS))

    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    inside = place < height * width
    first_y, from_y = _first(place // width + top, old_height, new_height, TIMES)
    first_x, from_x = _first(place % width + left, old_width, new_width, TIMES)
    reach_y = (2 * tl.maximum(old_height, new_height)).to(tl.int32)
    reach_x = (2 * tl.maximum(old_width, new_width)).to(tl.int32)
    step_y = (2 * new_height).to(tl.int32)
    step_x = (2 * new_width).to(tl.int32)
    last_y = old_height.to(tl.int32)
    last_x = old_width.to(tl.int32)

    red = tl.zeros((PLACES,), tl.float32)
    green = tl.zeros((PLACES,), tl.float32)
    blue = tl.zeros((PLACES,), tl.float32)
    whole = tl.zeros((PLACES,), tl.float32)
    for i in range((TIMES // 2 * reach_y + step_y // 2 - 1) // (step_y // 2)):
        y = first_y + i
        in_rows = inside & (y < last_y)
        weight_y = tl.where(y < last_y, _weight(from_y + i * step_y, reach_y, CUBIC), 0.0)
        start = source + y.to(tl.int64) * pitch
        row_red = tl.zeros((PLACES,), tl.float32)
        row_green = tl.zeros((PLACES,), tl.float32)
        row_blue = tl.zeros((PLACES,), tl.float32)
        row_whole = tl.zeros((PLACES,), tl.float32)
        for j in range((TIMES // 2 * reach_x + step_x // 2 - 1) // (step_x // 2)):
            x = first_x + j
            here = in_rows & (x < last_x)
            weight = tl.where(x < last_x, _weight(from_x + j * step_x, reach_x, CUBIC), 0.0)
            row_whole += weight
            row_red += weight * tl.load(start + x, mask=here, other=0).to(tl.float32)
            if CHANNELS == 3:
                row_green += weight * tl.load(start + plane + x, mask=here, other=0).to(tl.float32)
                row_blue += weight * tl.load(start + 2 * plane + x, mask=here, other=0).to(tl.float32)
        if CUBIC:
            row_red = _rounded(row_red, row_whole)
            if CHANNELS == 3:
                row_green = _rounded(row_green, row_whole)
                row_blue = _rounded(row_blue, row_whole)
            row_whole = tl.full((PLACES,), 1.0, tl.float32)
        whole += weight_y * row_whole
        red += weight_y * row_red
        if CHANNELS == 3:
            green += weight_y * row_green
            blue += weight_y * row_blue

    target += place * CHANNELS
    tl.store(target, _rounded(red, whole).to(tl.uint8), mask=inside)
    if CHANNELS == 3:
        tl.store(target + 1, _rounded(green, whole).to(tl.uint8), mask=inside)
        tl.store(target + 2, _rounded(blue, whole).to(tl.uint8), mask=inside)
