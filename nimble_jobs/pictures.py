"""Encoded pictures on their way to a decoder on the device, as a value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """The good records of a batch, one span each."""

    data: np.ndarray  # uint8 [*]; holds all spans
    spans: np.ndarray  # int64 [n, 2]: offset and length in bytes
    sizes: np.ndarray  # int32 [n, 2]: height and width of the picture, from its header
    # int64 [n]. 0: the span holds the final pixels, uint8 [height, width, channels]. Otherwise it holds a JPEG, and
    # files that share a positive number have headers that differ only in what decoders skip. -1: nothing is known.
    alike: np.ndarray

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def decoded(self) -> np.ndarray:
        """bool [n]: the span holds the final pixels, not a JPEG."""
        decoded: np.ndarray = self.alike == 0
        return decoded

    def bytes_of(self, row: int) -> np.ndarray:
        """uint8 [length]: a view of the row's span."""
        offset, length = self.spans[row].tolist()
        return self.data[offset : offset + length]
