"""Batches of pictures that a device decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nimble_jobs.data.batches import Part
from nimble_jobs.data.source import Joined, Source
from nimble_jobs.data.stamps import Stamps
from nimble_jobs.pictures import Pictures

if TYPE_CHECKING:  # Pillow is loaded by those who read pictures
    from nimble_jobs.data.decoder import ImageDecoder

_LARGEST = 1 << 20  # bytes of a picture that is left to a device; larger ones are scaled while they are decoded here
_IN_A_TABLE = 1 << 18  # the same in a table, whose pictures nobody has measured
_ALIGNED = 4096


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


def decoders_of(source: Source) -> list[ImageDecoder]:
    """What decodes the pictures of a source; nothing if it holds none."""
    parts = source.parts if isinstance(source, Joined) else [source]
    return [decoder for part in parts if (decoder := getattr(part, "decoder", None)) is not None]


def row_bytes(source: Source) -> int:
    """Bytes of a record in a batch that is left encoded: enough for its pixels, and for most files."""
    parts = source.parts if isinstance(source, Joined) else [source]
    largest = max((part.stamps.largest for part in parts if isinstance(part.stamps, Stamps)), default=_IN_A_TABLE)
    pixels = decoders_of(source)[0].recipe.nbytes
    return -(-max(pixels, min(largest, _LARGEST)) // _ALIGNED) * _ALIGNED
