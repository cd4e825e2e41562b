"""The one definition of a resize, for every decoder, processor and device: bilinear with antialiasing.

Each result is a weighted mean of source pixels. The weights form a triangle around the result's centre. It reaches one
source pixel to each side, or `old / new` pixels if the picture shrinks (Heckbert, "Survey of texture mapping", 1986).
Rows and columns are weighted separately. Sums are in float32 and are rounded once, half up. Pillow's BILINEAR has the
same weights, but rounds after each of its two passes.
"""

from __future__ import annotations

import numpy as np


def weights(old: int, new: int) -> np.ndarray:
    """float32 [new, old]: the weight of each source pixel in each result. Every row sums to one.

    Before normalisation, a weight is `max(0, reach - |(2 j + 1) new - (2 i + 1) old|)`, where `reach` is twice the
    larger size. All terms are whole numbers, so the triangle itself is exact.
    """
    centres = (2 * np.arange(new, dtype=np.int64) + 1) * old
    places = (2 * np.arange(old, dtype=np.int64) + 1) * new
    triangle = np.maximum(2 * max(old, new) - np.abs(places - centres[:, None]), 0)
    normal: np.ndarray = (triangle / triangle.sum(axis=1, keepdims=True)).astype(np.float32)
    return normal


def to_bytes(x: np.ndarray) -> np.ndarray:
    """Round float32 values half up and clamp them to uint8."""
    return np.clip(np.floor(x + np.float32(0.5)), 0, 255).astype(np.uint8)
