"""Values that readers return: batches of records, and bad records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from nimble_jobs.data.buffers import Buffer
from nimble_jobs.data.ragged import Ragged
from nimble_jobs.pictures import Pictures


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Shape and type of one record after the transform."""

    shape: tuple[int, ...]
    dtype: str  # numpy's name: float32 or int64
    stored: str = field(default="", compare=False)  # numpy's name of the type before the transform
    by_255: bool = False  # whether values were divided by 255, as bytes are without `transform.scale`

    def scaled_unlike(self, other: Signature) -> str | None:
        """What to say if nothing but the division by 255 tells these records from others; else None."""
        if self == other or replace(self, by_255=other.by_255) != other:
            return None
        mine, theirs = (f"{s.stored}, {'divided by 255' if s.by_255 else 'taken as they are'}" for s in (self, other))
        return f"records are {mine}; expected {theirs}"


@dataclass(frozen=True, kw_only=True)
class BadRecord:
    """A record that was left out, and the reason."""

    index: int  # position in the input
    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Records for which the model's output has NaN or infinity."""

    records: int
    first: str  # id of the first one


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """What is counted of a shard's good records."""

    shortened: int = 0  # texts that lost tokens
    not_finite: Mapping[str, NotFinite] = field(default_factory=dict)  # by field of the output


NO_COUNTS = ShardCounts()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows:
    """The tokens of the texts in a batch, one row each."""

    lengths: np.ndarray  # int32 [n], without padding
    shortened: np.ndarray  # bool [n], those that lost tokens
    ids: Ragged | None = None  # int32; None: not asked for
    offsets: Ragged | None = None  # int32 [tokens, 2], begin and end in characters of the text


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The records at positions [start, stop) of the reading order. Only good ones have a row."""

    start: int
    stop: int
    indexes: np.ndarray  # int64 [n], position in the input of each row
    ids: list[str]
    x: np.ndarray  # [n, *signature.shape], C-contiguous
    labels: np.ndarray | None  # int64 [n], or numbers as float32 [n] or [n, m]
    bad: tuple[BadRecord, ...]
    buffer: Buffer | None = None  # the memory of x or of the pictures, to be released after use
    tokens: TokenRows | None = None  # of texts
    pictures: Pictures | None = None  # pictures that the device will decode; x then has no rows

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, bad: Mapping[int, str]) -> Batch:
        """The batch without these rows, which become bad records for the reasons given. The rows of `x` that are left
        move together; those of `pictures` stay.
        """
        if not bad:
            return self
        rows = np.array([row for row in range(len(self)) if row not in bad], dtype=np.int64)
        records = [BadRecord(index=int(self.indexes[row]), id=self.ids[row], reason=why) for row, why in bad.items()]
        return replace(
            self,
            indexes=self.indexes[rows],
            ids=[self.ids[row] for row in rows.tolist()],
            x=np.ascontiguousarray(self.x[rows]) if self.pictures is None else self.x,
            labels=None if self.labels is None else self.labels[rows],
            bad=tuple(sorted((*self.bad, *records), key=lambda record: record.index)),
        )

    def release(self) -> None:
        """Release the memory of this batch for another one."""
        if self.buffer is not None:
            self.buffer.release()
