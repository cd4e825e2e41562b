"""Decodes pictures on the device, in a stage between reading and replaying.

Two threads, each with its own decoder, fill slots with rows of pixels. A picture that the device cannot decode is
decoded on the host, alone. If that fails too, it is a bad record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import numpy as np
import torch

from nimble_jobs.data import Batch
from nimble_jobs.engine.arrivals import Arrivals, Arrived
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.pipeline import Meter, Pool

Redo = Callable[[int], np.ndarray | str]  # position in the input -> uint8 [H, W, C], or why the record is bad

THREADS = 2  # a third one gained nothing on an H200


def decoders(make: Callable[[], PictureDecoder], count: int = THREADS) -> Pool[PictureDecoder]:
    """One for each of `count` threads. Close them when none decodes any more. Raises what `make` raises."""
    with ExitStack() as stack:
        made = [stack.enter_context(closing(make())) for _ in range(count)]
        stack.pop_all()  # only if one cannot be made are the others closed here
    return Pool(made)


class DeviceDecoding:
    """Decodes batches of encoded pictures into slots; `THREADS` threads may call it at once."""

    def __init__(self, redo: Redo, arrivals: Arrivals, meter: Meter, make: Callable[[], PictureDecoder]) -> None:
        self._redo, self._arrivals, self._meter = redo, arrivals, meter
        self._decoders = decoders(make)

    def __call__(self, batch: Batch) -> tuple[Arrived | None, Batch] | None:
        """The batch on the device, without the records that turn out to be bad; None once the job has ended.

        Releases the batch's buffer. Raises OutOfMemory, torch.AcceleratorError.
        """
        assert batch.pictures is not None
        found = self._decoders.take()
        assert found is not None
        decoder, done_with_it = found
        try:
            slot = self._arrivals.reserve()
            if slot is None:
                return None
            try:
                with self._meter.busy():
                    failed = decoder.decode(batch.pictures, slot.x, after=slot.taken)
                batch.release()
                with self._meter.busy(items=0):
                    left, kept, pixels = redone(batch, failed, self._redo)
                if not kept:
                    slot.give_back()
                    return None, left
            except BaseException:
                slot.give_back()
                raise
            write = _patch(slot.x, pixels, kept) if failed else None
            return self._arrivals.finish(slot, write, rows=len(kept), after=decoder.done), left
        finally:
            done_with_it()

    def close(self) -> None:
        """Release the decoders' memory."""
        for decoder in self._decoders:
            decoder.close()


def redone(batch: Batch, failed: Sequence[int], redo: Redo) -> tuple[Batch, list[int], dict[int, np.ndarray]]:
    """Decode on the host the rows that the device could not decode.

    Returns the batch without the rows that the host cannot decode either; the rows of the given batch that are left;
    and the pixels from the host, by row of the given batch.
    """
    made = {row: redo(int(batch.indexes[row])) for row in failed}
    bad = {row: why for row, why in made.items() if isinstance(why, str)}
    kept = [row for row in range(len(batch)) if row not in bad]
    return batch.without(bad), kept, {row: pixels for row, pixels in made.items() if isinstance(pixels, np.ndarray)}


def put(pixels: dict[int, np.ndarray], rows: torch.Tensor) -> None:
    """Write pixels from the host, uint8 [H, W, C] by row, to their rows of `rows`, uint8 [n, H, W, C]."""
    for row, made in pixels.items():
        rows[row].copy_(torch.from_numpy(np.ascontiguousarray(made)))


def _patch(whole: torch.Tensor, pixels: dict[int, np.ndarray], kept: list[int]) -> Callable[[torch.Tensor], object]:
    """A function that writes the host's pixels to their rows and moves the remaining rows together."""

    def write(rows: torch.Tensor) -> None:
        put(pixels, whole)
        if kept != list(range(len(kept))):
            rows.copy_(whole[torch.tensor(kept, device=whole.device)])

    return write
