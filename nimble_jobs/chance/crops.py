"""Random parts of pictures to train on. Equal values give the same rectangles in every decoder, process and thread.

The choice follows Szegedy et al. (Going Deeper with Convolutions, 2014) as implemented by torchvision's
`RandomResizedCrop`. It makes ten tries at an area and an aspect ratio, and puts the first that fits at a random place.
If none fits, it takes the largest part in the middle with an allowed ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from nimble_jobs.chance.words import below, draws, unit

_TRIES = 10
_PLACE = 2  # words, for top and left
_FLIPS = 1  # word, used by `workloads.training.augment`


@dataclass(frozen=True, kw_only=True)
class RandomCrops:
    """The random parts of one epoch."""

    seed: int
    epoch: int
    scale: tuple[float, float]  # least and largest share of the picture's area
    ratio: tuple[float, float]  # least and largest width over height
    first: int = 0  # position in the input of record 0

    def behind(self, records: int) -> RandomCrops:
        """The same parts for an input without its first `records` records."""
        return replace(self, first=self.first + records)

    def rectangle(self, index: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of one record's part, in pixels."""
        top, left, down, across = self.rectangles(np.array([index]), np.array([[height, width]]))[0].tolist()
        return top, left, down, across

    def rectangles(self, indexes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Top, left, height and width of each record's part, int32 [n, 4], each part at least one pixel.

        `indexes`, int64 [n], are positions in the input. `sizes`, int32 [n, 2], are the heights and widths of the
        upright pictures.
        """
        words = draws(self.seed, self.epoch, indexes + self.first, _PLACE + _FLIPS + 2 * _TRIES)
        first = _PLACE + _FLIPS
        shares = unit(words[:, first::2]) * (self.scale[1] - self.scale[0]) + self.scale[0]
        low, high = map(math.log, self.ratio)
        logs = unit(words[:, first + 1 :: 2]) * (high - low) + low
        found = np.empty((len(indexes), 4), dtype=np.int32)
        for i, (height, width) in enumerate(np.asarray(sizes).tolist()):
            size = self._size(height, width, shares[i].tolist(), logs[i].tolist())
            if size is None:
                found[i] = self._middle(height, width)
            else:
                rest = np.array([height - size[0] + 1, width - size[1] + 1])
                found[i] = *below(words[i, :_PLACE], rest).tolist(), *size
        return found

    def _size(self, height: int, width: int, shares: list[float], logs: list[float]) -> tuple[int, int] | None:
        """Height and width of the first try that fits; None if none does."""
        for share, log in zip(shares, logs, strict=True):
            area, ratio = share * height * width, math.exp(log)
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                return down, across
        return None

    def _middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        """The largest part in the middle with an allowed ratio: top, left, height, width."""
        down, across = height, width
        if width < self.ratio[0] * height:
            down = max(1, min(height, round(width / self.ratio[0])))
        elif width > self.ratio[1] * height:
            across = max(1, min(width, round(height * self.ratio[1])))
        return (height - down) // 2, (width - across) // 2, down, across
