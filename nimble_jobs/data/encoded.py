"""Batches of pictures that a device decodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nimble_jobs.data.batches import Part
from nimble_jobs.pictures import Pictures


def pictures_of(rows: np.ndarray, parts: Sequence[Part]) -> Pictures:
    """The good records of a batch whose records lie in `rows`, uint8 [n, *]."""
    width = rows.shape[1]
    good = [
        (at * width, row.length, row.height, row.width, row.decoded)
        for at, (i, row, loaded) in enumerate(
            (i, row, loaded) for _, loaded in parts for i, row in enumerate(loaded.rows)
        )
        if i not in loaded.bad
    ]
    table = np.array(good, dtype=np.int64).reshape(len(good), 5)
    return Pictures(
        data=rows.reshape(-1),
        spans=np.ascontiguousarray(table[:, :2]),
        sizes=np.ascontiguousarray(table[:, 2:4], dtype=np.int32),
        decoded=table[:, 4].astype(bool),
    )
