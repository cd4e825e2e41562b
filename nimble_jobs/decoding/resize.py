"""Implements the resize that `nimble_jobs.resizing` defines, on bytes, with cykooz-resizer or else with Pillow.

Both round after each of two passes, so a value may differ from the definition by one. cykooz-resizer wraps
fast_image_resize, a port of Pillow's algorithm to AVX2, SSE4.1 and NEON. It takes a quarter of Pillow's time.
"""

from __future__ import annotations

import threading
from importlib.metadata import version
from typing import Any

import numpy as np
from PIL import Image

from nimble_jobs.resizing import Interpolation

try:
    import cykooz_resizer as simd
except ImportError:  # no wheel for this processor or C library
    simd = None

_PILLOW: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels of the source


def resizer() -> str:
    """Name and version of the library that resizes."""
    return f"cykooz-resizer {version('cykooz-resizer')}" if simd is not None else f"Pillow {version('pillow')}"


def resized(
    pixels: np.ndarray, size: tuple[int, int], box: Box | None = None, interpolation: Interpolation = "bilinear"
) -> np.ndarray:
    """uint8 [*size] or [*size, 3] of a picture, uint8 [height, width] or [height, width, 3], or of the part in `box`.

    With antialiasing; `size` is (height, width). Pillow does bicubic itself: its pixels are those that processors of
    transformers make.
    """
    (old_height, old_width), (height, width) = pixels.shape[:2], size
    whole = box is None or box == (0, 0, old_width, old_height)
    if whole and (old_height, old_width) == size:
        return pixels
    if simd is None or interpolation == "bicubic":
        return np.asarray(Image.fromarray(pixels).resize((width, height), _PILLOW[interpolation], box=box))
    kind = simd.PixelType.U8 if pixels.ndim == 2 else simd.PixelType.U8x3
    options = _tools().whole
    if not whole:
        assert box is not None
        options = _options(simd.CropBox(box[0], box[1], box[2] - box[0], box[3] - box[1]))
    target = simd.ImageData(width, height, kind)
    _tools().resizer.resize(simd.ImageData(old_width, old_height, kind, pixels.tobytes()), target, options)
    return np.frombuffer(target.get_buffer(), dtype=np.uint8).reshape(*size, *pixels.shape[2:])


def _options(box: Any = None) -> Any:
    bilinear = simd.ResizeAlg.convolution(simd.FilterType.bilinear)
    return simd.ResizeOptions(resize_alg=bilinear, use_alpha=False, crop_box=box)


class _Tools(threading.local):
    """A resizer for each thread. It keeps memory between calls, so threads cannot share one."""

    def __init__(self) -> None:
        self.resizer = simd.Resizer()
        self.whole = _options()


_held: list[_Tools] = []


def _tools() -> _Tools:
    if not _held:
        _held.append(_Tools())
    return _held[0]
