"""The one definition of a resize: bilinear with antialiasing, whichever decoder, processor or device computes it.

Each result is a weighted mean of source pixels. The weights form a triangle around the result's centre that reaches one
source pixel far, or `old / new` pixels when the picture is reduced (Heckbert, "Survey of texture mapping", 1986). Rows
and columns are weighted apart. Sums are in float32 and round once, half up. Pillow's BILINEAR has the same weights, but
rounds after each of its two passes.
"""

from __future__ import annotations

import numpy as np


def weights(old: int, new: int) -> np.ndarray:
    """float32 [new, old]: what each source pixel contributes to each result; every row sums to one.

    Up to normalisation a weight is `reach - |(2 j + 1) new - (2 i + 1) old|` where that is positive, and `reach` is
    twice the larger size. All are whole numbers, so the triangle itself is exact.
    """
    centres = (2 * np.arange(new, dtype=np.int64) + 1) * old
    places = (2 * np.arange(old, dtype=np.int64) + 1) * new
    triangle = np.maximum(2 * max(old, new) - np.abs(places - centres[:, None]), 0)
    normal: np.ndarray = (triangle / triangle.sum(axis=1, keepdims=True)).astype(np.float32)
    return normal


def to_bytes(x: np.ndarray) -> np.ndarray:
    """float32 rounded half up and clamped, as uint8."""
    return np.clip(np.floor(x + np.float32(0.5)), 0, 255).astype(np.uint8)
