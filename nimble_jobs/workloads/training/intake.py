"""How records of a training get from readers to its device: as values, as they are stored, or still encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data import Batch, Reader
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.engine.pinned import pin
from nimble_jobs.pipeline import Meter
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.workloads.decoding import put, redone

if TYPE_CHECKING:
    from nimble_jobs.decoding.recipe import Recipe

_BUFFERS = 12  # batches that are being read or sent, of two segments at most
_BUFFER_BYTES = 1 << 30  # of pinned memory; above it there are fewer
_FEWEST = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """A batch, and its rows where they are now."""

    batch: Batch
    x: np.ndarray | torch.Tensor
    preprocess: Preprocess | None  # what is left to be done to x


class Intake:
    """Reads batches for one device. Several threads may read at once, each its own batches.

    `on_device`: pictures are decoded there. On a GPU what arrives is used on `stream`.
    """

    def __init__(
        self,
        device: torch.device,
        readers: Sequence[Reader] = (),
        *,
        on_device: bool = False,
        batch_size: int = 1,
        read: Meter | None = None,
        decode: Meter | None = None,
        make: Callable[[torch.device, Recipe], PictureDecoder] | None = None,
    ) -> None:
        """`batch_size`: the largest one that will be asked for."""
        self.device, self.stored = device, device.type == "cuda" or on_device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on_device = on_device
        self._read, self._decode = read, decode or Meter("decode")
        self._make = make or _decoder
        self._decoders: dict[Recipe, PictureDecoder] = {}
        self._lock = threading.Lock()  # a decoder is for one thread at a time
        self._after = torch.cuda.Event() if self.stream is not None else None
        self._buffers = self._room(readers, batch_size) if self.stream is not None else None

    def batches(
        self,
        reader: Reader,
        start: int,
        *,
        batch_size: int,
        order: np.ndarray | None = None,
        crops: RandomCrops | None = None,
    ) -> Generator[Taken]:
        """Batches from a position of the reading order on; with `crops`, of random parts of pictures.

        Whoever is done with `batch` releases it. Raises DataError, OutOfMemory.
        """
        preprocess = reader.preprocess if self.stored else None
        encoded = self._on_device and reader.decodes
        source = reader.batches(
            start,
            batch_size=batch_size,
            order=order,
            stored=preprocess is not None,
            encoded=encoded,
            crops=crops,
            buffers=None if preprocess is None else self._buffers,
            meter=self._read,
        )
        with closing(source):  # type: ignore[type-var]  # a generator
            for batch in source:
                found, x = self._decoded(reader, batch, crops) if encoded else (batch, batch.x)
                yield Taken(batch=found, x=x, preprocess=preprocess)

    def end(self) -> None:
        """Wake whoever waits for a buffer; their batches end."""
        if self._buffers is not None:
            self._buffers.end()

    def close(self) -> None:
        """Give memory back, once nobody reads any more."""
        for decoder in self._decoders.values():
            decoder.close()
        if self._buffers is not None:
            self._buffers.close()

    def _room(self, readers: Sequence[Reader], batch_size: int) -> Buffers | None:
        row_bytes = [
            r.encoded_bytes
            if self._on_device and r.decodes
            else int(np.prod(r.preprocess.shape)) * np.dtype(r.preprocess.dtype).itemsize
            for r in readers
            if r.preprocess is not None
        ]
        if not row_bytes:
            return None
        nbytes = batch_size * max(row_bytes)
        found = Buffers(max(_FEWEST, min(_BUFFERS, _BUFFER_BYTES // max(1, nbytes))), nbytes)
        pin(found.memory, self.device)
        return found

    def _decoded(self, reader: Reader, batch: Batch, crops: RandomCrops | None) -> tuple[Batch, torch.Tensor]:
        """The batch without records that turn out to be bad, and uint8 [n, H, W, C] on the device."""
        assert batch.pictures is not None
        boxes = None if crops is None else crops.rectangles(batch.indexes, batch.pictures.sizes)
        try:
            with self._lock, self._on_stream(), self._decode.busy():
                x = torch.empty((len(batch), *reader.recipe.shape), dtype=torch.uint8, device=self.device)
                if self._after is not None:  # the memory may have been used before, on this stream
                    self._after.record()
                decoder = self._decoder(reader)
                failed = decoder.decode(batch.pictures, x, boxes=boxes, after=self._after) if len(batch) else ()
                if self.stream is not None and decoder.done is not None:
                    self.stream.wait_event(decoder.done)
        finally:
            batch.release()
        left, kept, pixels = redone(batch, failed, partial(reader.redo, crops=crops))
        with self._on_stream():
            put(pixels, x)
            if len(kept) < len(batch):
                x = x[torch.tensor(kept, dtype=torch.int64, device=self.device)]
        return left, x

    def _decoder(self, reader: Reader) -> PictureDecoder:
        recipe = reader.recipe
        if recipe not in self._decoders:
            self._decoders[recipe] = self._make(self.device, recipe)
        return self._decoders[recipe]

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def _decoder(device: torch.device, recipe: Recipe) -> PictureDecoder:
    return PictureDecoder(device, *recipe.size, recipe.channels, resize=recipe.resize, center_crop=recipe.center_crop)
