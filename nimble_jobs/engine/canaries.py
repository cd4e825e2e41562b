"""Whether each part of a tensor was written to, by a few bytes that nobody would write by chance.

JPEG engines can leave out a picture of a batch and still report success.
"""

from __future__ import annotations

import numpy as np
import torch

_PLACES = 16  # in each part


class Canaries:
    """Bytes that were put into parts of a tensor."""

    def __init__(self, memory: torch.Tensor, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Put them into parts of `memory`, uint8 [*], that begin at `starts` and have `lengths` bytes, int64 [n].

        All of this is work on the current stream. Bytes between those that are put stay as they are.
        """
        inside = np.arange(_PLACES) * (lengths[:, None] - 1) // (_PLACES - 1)
        self._memory = memory
        self._places = torch.from_numpy(starts[:, None] + inside).to(memory.device)
        values = (inside * 37 + 90) % 256  # what lies in a part depends on the place there
        self._values = torch.from_numpy(values.astype(np.uint8)).to(memory.device)
        self._memory[self._places] = self._values

    def untouched(self) -> np.ndarray:
        """bool [n]: which parts hold all of them still. Waits for the current stream.

        A part that was written to holds as many equal bytes by chance only if it is one byte long, or all of one
        pattern.
        """
        same: np.ndarray = (self._memory[self._places] == self._values).all(dim=1).cpu().numpy()
        return same
