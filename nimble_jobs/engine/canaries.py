"""Whether each part of a tensor was written to, by a few bytes that hardly any picture has there.

JPEG engines can leave out a picture of a batch and still report success.
"""

from __future__ import annotations

import numpy as np
import torch

_FILL = 90  # grey, and no value that the engines were seen to write where they failed
_PLACES = 16  # in each part


def blank(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes], filled on the current stream. A part that nobody writes to holds no earlier picture."""
    return torch.full((nbytes,), _FILL, dtype=torch.uint8, device=device)


def untouched(memory: torch.Tensor, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool [n]: which parts of memory from `blank` nobody has written to. Waits for the current stream.

    Parts begin at `starts` and have `lengths` bytes, int64 [n]. A part that was written to counts as untouched if 16 of
    its bytes, evenly spread, have the fill's value. A grey picture may; another decoder then has to decode it.
    """
    inside = np.arange(_PLACES) * (lengths[:, None] - 1) // (_PLACES - 1)
    places = torch.from_numpy(starts[:, None] + inside).to(memory.device)
    same: np.ndarray = (memory[places] == _FILL).all(dim=1).cpu().numpy()
    return same
