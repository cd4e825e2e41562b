"""Random parts of pictures to train on, as values that any decoder, process or thread gets the same rectangles from.

The choice is that of Szegedy et al. (Going Deeper with Convolutions, 2014) as torchvision's `RandomResizedCrop` makes
it: ten tries at an area and an aspect ratio, the first of which that fits is placed anywhere; else the largest part in
the middle whose ratio is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from nimble_jobs.chance.words import below, draws, unit

_TRIES = 10
_PLACE = 2  # words: top and left
_FLIPS = 1  # word, which `workloads.training.augment` uses


@dataclass(frozen=True, kw_only=True)
class RandomCrops:
    """The parts of one epoch."""

    seed: int
    epoch: int
    scale: tuple[float, float]  # least and largest share of the picture's area
    ratio: tuple[float, float]  # least and largest width over height
    first: int = 0  # position in the input of what counts as record 0

    def behind(self, records: int) -> RandomCrops:
        """The same for an input without its first records."""
        return replace(self, first=self.first + records)

    def rectangle(self, index: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of one record's part."""
        top, left, down, across = self.rectangles(np.array([index]), np.array([[height, width]]))[0].tolist()
        return top, left, down, across

    def rectangles(self, indexes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Top, left, height and width of each record's part, int32 [n, 4], each part at least one pixel.

        `indexes` int64 [n] are positions in the input, `sizes` int32 [n, 2] height and width of each picture as it is
        seen: upright.
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
        """Height and width of the first try that fits."""
        for share, log in zip(shares, logs, strict=True):
            area, ratio = share * height * width, math.exp(log)
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                return down, across
        return None

    def _middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        """The largest part in the middle whose ratio is allowed."""
        down, across = height, width
        if width < self.ratio[0] * height:
            down = max(1, min(height, round(width / self.ratio[0])))
        elif width > self.ratio[1] * height:
            across = max(1, min(width, round(height * self.ratio[1])))
        return (height - down) // 2, (width - across) // 2, down, across
