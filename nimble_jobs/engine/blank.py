"""Memory that JPEG engines decode into, blank before each batch.

Engines can leave out a picture of a batch and still report success. Its memory then holds no earlier picture, and looks
into a few of its bytes show that nobody wrote to it.
"""

from __future__ import annotations

import torch

from nimble_jobs.engine import enqueue

BLANK = 90  # in each byte: grey, and no value that the engines were seen to write where they failed


class BlankMemory:
    """Memory for the batches of one stream, kept from batch to batch up to `most_bytes`."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device, self._most_bytes = device, most_bytes
        self._kept: torch.Tensor | None = None

    def take(self, nbytes: int, stream: torch.cuda.Stream) -> torch.Tensor:
        """uint8 [>= nbytes], all BLANK, ready for engines, which wait for no stream. Raises OutOfMemory."""
        flat, self._kept = self._kept, None
        if flat is not None and len(flat) >= nbytes:
            return flat
        del flat  # so that its memory can be used again
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        enqueue.fill(flat, BLANK, stream)
        stream.synchronize()
        return flat

    def give_back(self, flat: torch.Tensor, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Make the first `nbytes` blank again after all work on the stream, and wait for it."""
        keep = len(flat) <= self._most_bytes
        if keep:
            enqueue.fill(flat[:nbytes], BLANK, stream)
        stream.synchronize()
        self._kept = flat if keep else None

    def drop(self) -> None:
        """Give the memory to others. The stream must be idle."""
        self._kept = None
