"""In which order records are trained on: a permutation for each epoch, and the place in it."""

from __future__ import annotations

from typing import Literal

import numpy as np


class Sampler:
    """Batches of shuffled records, the same for equal seed, epoch and number of records.

    `last_batch` says what happens to the rest that fills no batch: keep (a short batch) or drop.
    """

    def __init__(self, total: int, batch_size: int, *, seed: int, last_batch: Literal["keep", "drop"] = "keep") -> None:
        self.total = total
        self.batch_size = batch_size
        self._seed = seed
        whole = total // batch_size
        self.batches = whole if last_batch == "drop" else -(-total // batch_size)  # in one epoch
        self.records = min(total, self.batches * batch_size)  # in one epoch

    def order(self, epoch: int) -> np.ndarray:
        """Indexes of the epoch's records, int64 [records]; the first epoch is 1."""
        return np.random.default_rng([self._seed, epoch]).permutation(self.total)[: self.records]
