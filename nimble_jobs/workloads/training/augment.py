"""Random changes to training images.

Each record's draws are a function of seed, epoch and the record's position in the input. So they do not depend on the
order of reading, on threads, or on where an interrupted training goes on. The function is SplitMix64 (Steele, Lea and
Flood: Fast Splittable Pseudorandom Number Generators, 2014), used as a hash.
"""

from __future__ import annotations

import numpy as np

from nimble_jobs.data import Signature
from nimble_jobs.errors import DataError
from nimble_jobs.spec import AugmentSpec, TransformSpec

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
    """Crops and flips batches of images. Raises DataError where records are no images."""

    def __init__(self, spec: AugmentSpec, transform: TransformSpec, signature: Signature, *, seed: int) -> None:
        self._padding, self._flip, self._seed = spec.crop_padding, spec.flip, seed
        if not self:
            return
        if len(signature.shape) != 3 or signature.dtype != "float32":
            raise DataError(
                f"train.augment: records are {signature.dtype} {list(signature.shape)}; expected images, [C, H, W]"
            )
        black = np.zeros((signature.shape[0], 1, 1), dtype=np.float32)
        for values, apply in ((transform.mean, np.subtract), (transform.std, np.divide)):
            if values is not None:
                black = apply(black, np.asarray(values, dtype=np.float32).reshape(-1, 1, 1))
        self._black = black

    def __bool__(self) -> bool:
        return bool(self._padding or self._flip)

    def __call__(self, x: np.ndarray, indexes: np.ndarray, epoch: int) -> np.ndarray:
        """The batch float32 [n, C, H, W] changed, as a new array; `indexes` int64 [n] are positions in the input."""
        words = draws(self._seed, epoch, indexes, _DRAWS)
        if self._padding:
            x = self._cropped(x, words)
        if self._flip in ("horizontal", "both"):
            x = _flipped(x, words[:, 2], 0, axis=3)
        if self._flip in ("vertical", "both"):
            x = _flipped(x, words[:, 2], 1, axis=2)
        return x

    def _cropped(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        n, _, height, width = x.shape
        pad = self._padding
        padded = np.empty((n, x.shape[1], height + 2 * pad, width + 2 * pad), dtype=x.dtype)
        padded[:] = self._black
        padded[:, :, pad : pad + height, pad : pad + width] = x
        tops, lefts = below(words[:, 0], 2 * pad + 1).tolist(), below(words[:, 1], 2 * pad + 1).tolist()
        cropped = np.empty_like(x)
        for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
            cropped[i] = padded[i, :, top : top + height, left : left + width]
        return cropped


def _flipped(x: np.ndarray, words: np.ndarray, bit: int, *, axis: int) -> np.ndarray:
    chosen = (words >> np.uint64(63 - bit)).astype(np.uint64) & np.uint64(1)
    return np.where(chosen.astype(bool)[:, None, None, None], np.flip(x, axis), x)


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + _GAMMA
    for shift, factor in _ROUNDS:
        z = (z ^ (z >> shift)) * factor
    return np.asarray(z ^ (z >> _LAST))
