"""A column whose records have lists of different lengths, such as a value for each token of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np


class Ragged(Sequence[np.ndarray]):
    """Lists of the same type and trailing shape, held as one array."""

    def __init__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        """values: [sum(lengths), ...], numbers or text, of one record after the other; lengths: int [records]."""
        self.values = values
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self._ends = np.cumsum(self.lengths)
        assert len(values) == (self._ends[-1] if len(self._ends) else 0)

    @classmethod
    def trimmed(cls, padded: np.ndarray, lengths: np.ndarray) -> Ragged:
        """A copy of [records, positions, ...] with only the first `lengths[i]` positions of record i."""
        inside = np.arange(padded.shape[1]) < np.asarray(lengths)[:, None]
        return cls(padded[inside], lengths)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """The records of all parts, in order."""
        return cls(np.concatenate([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Ragged:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        at = range(len(self))[index]
        return self.values[self._ends[at] - self.lengths[at] : self._ends[at]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(np.split(self.values, self._ends[:-1])) if len(self) else iter(())

    def take(self, order: np.ndarray) -> Ragged:
        """These records, in this order."""
        lengths = self.lengths[order]
        starts = (self._ends - self.lengths)[order]
        places = np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return Ragged(self.values[places], lengths)
