"""Finds records that hold NaN or infinity, or would after their arithmetic. They are bad records."""

from __future__ import annotations

import numpy as np

from nimble_jobs.data.transform import on_host
from nimble_jobs.preprocess import Preprocess

_HALF_BITS = np.uint16(0x7FFF)  # all bits of a float16 except the sign


def not_finite(x: np.ndarray, preprocess: Preprocess | None) -> dict[int, str]:
    """The rows of a batch that are not finite, each with the reason; with `preprocess`, after it was applied.

    Stored rows whose largest number cannot overflow are finite. For the few others the arithmetic is done here, so that
    the device and the host find the same bad records.
    """
    if x.dtype.kind != "f" or not x.size:
        return {}
    if preprocess is None:
        return _reasons(x, np.arange(len(x)))
    suspects = np.flatnonzero(~_small(x.reshape(len(x), -1), preprocess.largest))
    return _reasons(on_host(preprocess, x[suspects]), suspects) if len(suspects) else {}


def _small(rows: np.ndarray, largest: float) -> np.ndarray:
    """bool [n]: whether all numbers of a row are in [-largest, largest]; NaN never is."""
    if rows.dtype == np.float16:  # the bits without the sign sort by size, and numpy compares integers faster
        limit = np.float16(min(largest, float(np.finfo(np.float16).max)))
        return np.asarray((rows.view(np.uint16) & _HALF_BITS).max(axis=1) <= limit.view(np.uint16))
    with np.errstate(invalid="ignore"):
        return np.asarray((rows.max(axis=1) <= largest) & (rows.min(axis=1) >= -largest))


def _reasons(x: np.ndarray, places: np.ndarray) -> dict[int, str]:
    if np.isfinite(x.min()) and np.isfinite(x.max()):  # NaN propagates through both minimum and maximum
        return {}
    finite = np.isfinite(x)
    per_row = x[0].size
    count = per_row - finite.reshape(len(x), -1).sum(axis=1)
    return {
        int(places[row]): f"{count[row]} of {per_row} values are NaN or infinite; expected finite numbers"
        for row in np.flatnonzero(count).tolist()
    }
