"""Crops and flips written out image by image."""

from __future__ import annotations

import numpy as np

from nimble_jobs.chance import below, draws
from nimble_jobs.spec import AugmentSpec


def changed(
    x: np.ndarray, indexes: np.ndarray, epoch: int, spec: AugmentSpec, *, seed: int, black: np.ndarray
) -> np.ndarray:
    """Crops and flips of values [n, C, H, W], image by image; `black` [C, 1, 1] comes in at the sides."""
    pad, (_, _, height, width) = spec.crop_padding, x.shape
    found = []
    for image, (top, left, flips) in zip(x, draws(seed, epoch, indexes, 3), strict=True):
        wide = np.broadcast_to(black, (len(image), height + 2 * pad, width + 2 * pad)).astype(x.dtype)
        wide[:, pad : pad + height, pad : pad + width] = image
        row, column = (int(below(np.array([word]), 2 * pad + 1)[0]) for word in (top, left))
        image = wide[:, row : row + height, column : column + width]
        if spec.flip in ("horizontal", "both") and int(flips) >> 63:
            image = image[:, :, ::-1]
        if spec.flip in ("vertical", "both") and int(flips) >> 62 & 1:
            image = image[:, ::-1]
        found.append(image)
    return np.stack(found)
