"""Random numbers that are a function of seed, epoch and record alone.

They do not depend on the order of reading, on threads or processes, or on where an interrupted training resumes. The
function is SplitMix64 (Steele, Lea and Flood: Fast Splittable Pseudorandom Number Generators, 2014), used as a hash.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)
_UNIT = 2.0**-53


def draws(seed: int, epoch: int, indexes: np.ndarray, count: int) -> np.ndarray:
    """`count` random words for each record, uint64 [len(indexes), count]. A larger count does not change the first
    ones.

    `indexes` int64 [n] are positions in the input.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.full(1, seed % 2**64, dtype=np.uint64))
        state = _mix(state + _mix(np.full(1, epoch, dtype=np.uint64)))
        records = _mix(state + indexes.astype(np.uint64))
        return _mix(records[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)


def below(words: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
    """Whole numbers in [0, limit), int64, from the upper half of each word. `limit` is at most 2^31."""
    return ((words >> np.uint64(32)) * np.asarray(limit, dtype=np.uint64) >> np.uint64(32)).astype(np.int64)


def unit(words: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), float64, from the upper 53 bits of each word."""
    return (words >> np.uint64(11)).astype(np.float64) * _UNIT


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + _GAMMA
    for shift, factor in _ROUNDS:
        z = (z ^ (z >> shift)) * factor
    return np.asarray(z ^ (z >> _LAST))
