"""The F1 score of classes: the harmonic mean of precision and recall."""

from __future__ import annotations

import torch


class F1:
    """Counts on the device without waiting for it.

    With two classes the score is that of the second one. With more it is the mean over all classes that occur, in
    labels or in answers. A class that is never right has 0. (C. J. van Rijsbergen, Information Retrieval, 1979.)
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self._right, self._answers, self._labels = torch.zeros(3, classes, dtype=torch.int64, device=device)

    def count(self, top1: torch.Tensor, y: torch.Tensor) -> None:
        """One batch: int64 [n] each."""
        self._answers.scatter_add_(0, top1, torch.ones_like(top1))
        self._labels.scatter_add_(0, y, torch.ones_like(y))
        self._right.scatter_add_(0, y, (top1 == y).long())

    def value(self) -> float:
        """The score of all batches so far; 0 if there were none."""
        right, both = self._right.double(), (self._answers + self._labels).double()
        scores = torch.where(both > 0, 2 * right / both.clamp(min=1), 0.0)
        if len(scores) == 2:
            return float(scores[1])
        occurs = both > 0
        return float(scores[occurs].mean()) if bool(occurs.any()) else 0.0
