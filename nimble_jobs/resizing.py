"""The one definition of a resize, for every decoder, processor and device: bilinear or bicubic, with antialiasing.

Each result is a weighted mean of source pixels around the result's centre. If the picture shrinks, the weights reach
`old / new` times as far (Heckbert, "Survey of texture mapping", 1986). Bilinear weights form a triangle that reaches a
pixel to each side. Bicubic ones follow the cubic of Keys ("Cubic convolution interpolation", 1981) with a = -1/2, which
reaches two pixels and is negative beyond the first. Rows and columns are weighted separately.

Bilinear sums are in float32 and are rounded once, half up. Pillow's BILINEAR has the same weights, but rounds after
both of its passes. Bicubic sums can lie outside of 0 to 255, so they are rounded and clamped after each pass, columns
first. That is Pillow's BICUBIC, up to how Pillow rounds its weights.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Interpolation = Literal["bilinear", "bicubic"]


def weights(old: int, new: int, interpolation: Interpolation = "bilinear") -> np.ndarray:
    """float32 [new, old]: the weight of each source pixel in each result. Every row sums to one.

    A pixel's distance, in units of `1 / (2 new)`, is `|(2 j + 1) new - (2 i + 1) old|`, and `reach` is twice the larger
    size. Both are whole numbers, so the triangle `max(0, reach - distance)` is exact before it is normalised.
    """
    centres = (2 * np.arange(new, dtype=np.int64) + 1) * old
    places = (2 * np.arange(old, dtype=np.int64) + 1) * new
    distances, reach = np.abs(places - centres[:, None]), 2 * max(old, new)
    shape = np.maximum(reach - distances, 0) if interpolation == "bilinear" else _keys(distances / reach)
    normal: np.ndarray = (shape / shape.sum(axis=1, keepdims=True)).astype(np.float32)
    return normal


def _keys(t: np.ndarray) -> np.ndarray:
    """Keys' cubic with a = -1/2 at distances t >= 0."""
    near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
    return np.where(t < 1, near, np.where(t < 2, far, 0.0))


def to_bytes(x: np.ndarray) -> np.ndarray:
    """Round float32 values half up and clamp them to uint8."""
    return np.clip(np.floor(x + np.float32(0.5)), 0, 255).astype(np.uint8)
