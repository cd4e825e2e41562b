"""What is left to be done to a batch of records once it is on the device, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["hw", "chw", "hwc"]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Records cross to the device as `dtype` and `shape`; the device makes `result` of them, in the model's dtype.

    In this order: images are brought to CHW, resized (bilinear with antialiasing), cropped around the centre and
    given their channels; then `(x * scale - mean) / std` in float32.
    """

    shape: tuple[int, ...]  # of one record as it crosses
    dtype: str  # numpy's name
    result: tuple[int, ...]  # shape of one record as the model takes it
    layout: Layout | None = None  # None: no image
    resize: tuple[int, int] | None = None  # height, width
    center_crop: tuple[int, int] | None = None  # height, width
    channels: int | None = None  # 1 or 3; None: as they are
    scale: float | None = None  # None: whole numbers stay whole, and there is no arithmetic
    mean: tuple[float, ...] | None = None  # one for all channels or one each
    std: tuple[float, ...] | None = None
