"""Batches of encoded pictures, which a device decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nimble_jobs.data.batches import Part
from nimble_jobs.data.joined import Joined
from nimble_jobs.data.source import Source
from nimble_jobs.data.stamps import Stamps
from nimble_jobs.decoding.work import ALIKE, COLUMNS, HEIGHT, LENGTH, WIDTH
from nimble_jobs.pictures import Pictures

if TYPE_CHECKING:  # imported here, so that only jobs with pictures load Pillow
    from nimble_jobs.data.decoder import ImageDecoder

_LARGEST = 1 << 20  # largest picture for a device, in bytes; the host decodes larger ones at a reduced scale
_IN_A_TABLE = 1 << 18  # the same for tables, whose pictures were not measured
_ALIGNED = 4096


def pictures_of(rows: np.ndarray, parts: Sequence[Part]) -> Pictures:
    """The good pictures of a batch with its records in `rows`, uint8 [n, *]."""
    width = rows.shape[1]
    kept, tables, first = [], [], 0
    for _, loaded in parts:
        assert loaded.rows is not None
        good = np.delete(np.arange(len(loaded.rows)), list(loaded.bad))
        kept.append(first + good)
        tables.append(loaded.rows[good])
        first += len(loaded.rows)
    at = np.concatenate(kept) if kept else np.empty(0, dtype=np.int64)
    table = np.concatenate(tables) if tables else np.empty((0, COLUMNS), dtype=np.int64)
    return Pictures(
        data=rows.reshape(-1),
        spans=np.stack([at * width, table[:, LENGTH]], axis=1),
        sizes=np.ascontiguousarray(table[:, [HEIGHT, WIDTH]], dtype=np.int32),
        alike=table[:, ALIKE],
    )


def decoders_of(source: Source) -> list[ImageDecoder]:
    """The decoders of a source's pictures; empty if it has none."""
    parts = source.parts if isinstance(source, Joined) else [source]
    return [decoder for part in parts if (decoder := getattr(part, "decoder", None)) is not None]


def row_bytes(source: Source) -> int:
    """Bytes per record in a batch of encoded pictures: enough for the pixels, and for most files."""
    parts = source.parts if isinstance(source, Joined) else [source]
    largest = max((part.stamps.largest for part in parts if isinstance(part.stamps, Stamps)), default=_IN_A_TABLE)
    pixels = decoders_of(source)[0].recipe.nbytes
    return -(-max(pixels, min(largest, _LARGEST)) // _ALIGNED) * _ALIGNED
