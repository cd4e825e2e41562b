"""Random changes to training images: where each of their pixels comes from.

Each record's draws are a function of seed, epoch and the record's position in the input. So they do not depend on the
order of reading, on threads, or on where an interrupted training goes on. The function is SplitMix64 (Steele, Lea and
Flood: Fast Splittable Pseudorandom Number Generators, 2014), used as a hash.
"""

from __future__ import annotations

import numpy as np

from nimble_jobs.data import Signature
from nimble_jobs.errors import DataError
from nimble_jobs.spec import AugmentSpec

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)
_DRAWS = 3  # rows, columns, flips


def draws(seed: int, epoch: int, indexes: np.ndarray, count: int) -> np.ndarray:
    """`count` random words a record, uint64 [len(indexes), count]."""
    with np.errstate(over="ignore"):
        state = _mix(np.full(1, seed % 2**64, dtype=np.uint64))
        state = _mix(state + _mix(np.full(1, epoch, dtype=np.uint64)))
        records = _mix(state + indexes.astype(np.uint64))
        return _mix(records[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)


def below(words: np.ndarray, limit: int) -> np.ndarray:
    """Whole numbers from 0 to below `limit`, at most 2^31, int64, by the upper half of each word."""
    return ((words >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


class Augment:
    """Crops and flips of images. Raises DataError where records are no images."""

    def __init__(self, spec: AugmentSpec, signature: Signature, *, seed: int) -> None:
        self.padding, self._flip, self._seed = spec.crop_padding, spec.flip, seed
        self._shape = signature.shape
        if self and (len(signature.shape) != 3 or signature.dtype != "float32"):
            raise DataError(
                f"train.augment: records are {signature.dtype} {list(signature.shape)}; expected images, [C, H, W]"
            )

    def __bool__(self) -> bool:
        return bool(self.padding or self._flip)

    def places(self, indexes: np.ndarray, epoch: int) -> np.ndarray:
        """For each record the row that each of its rows comes from, then the same for columns: int64 [n, H + W].

        They are counted in the image with its padding; `indexes` int64 [n] are positions in the input.
        """
        words = draws(self._seed, epoch, indexes, _DRAWS)
        _, height, width = self._shape
        flips = words[:, 2] >> np.uint64(62)
        rows = self._axis(height, words[:, 0], flips & np.uint64(1), flipped=self._flip in ("vertical", "both"))
        columns = self._axis(width, words[:, 1], flips >> np.uint64(1), flipped=self._flip in ("horizontal", "both"))
        return np.concatenate([rows, columns], axis=1)

    def _axis(self, length: int, words: np.ndarray, flips: np.ndarray, *, flipped: bool) -> np.ndarray:
        starts = below(words, 2 * self.padding + 1)
        forward = np.arange(length)
        if not flipped:
            return starts[:, None] + forward
        return starts[:, None] + np.where(flips.astype(bool)[:, None], forward[::-1], forward)


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + _GAMMA
    for shift, factor in _ROUNDS:
        z = (z ^ (z >> shift)) * factor
    return np.asarray(z ^ (z >> _LAST))
