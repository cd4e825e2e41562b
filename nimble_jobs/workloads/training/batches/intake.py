"""From a reader to the device of a training. Records arrive as values, as they are stored, or still encoded."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data import Batch, Reader, Wanted
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.engine.device import able
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.engine.streams import take_for
from nimble_jobs.pipeline import Meter, Pool, mapped
from nimble_jobs.planner.jobs.loaded import as_many, pinned_buffers
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.workloads.decode import Decode
from nimble_jobs.workloads.decoding import decoders, put, redone
from nimble_jobs.workloads.stages import summary_of

if TYPE_CHECKING:
    from nimble_jobs.decoding.recipe import Recipe

_BUFFERS, _FEWEST_BUFFERS = 12, 6  # batches that are being read or sent; they belong to two segments at most
# One that decodes: nvJPEG gives each decoder 14 streams, and with those of two and of the steps a device runs out of
# queues. Then streams share one, and a decoder waits for whole steps (decision 0085).
_DECODERS = 1
_DECODED_AHEAD = _DECODERS + 1  # batches that are being decoded, and one that waits
_BUFFER_BYTES = 1 << 30  # of pinned memory in all, unless the fewest buffers need more


@dataclass(frozen=True, kw_only=True)
class Data:
    """The records of a training, those that are held out for its validations, and what decodes pictures."""

    reader: Reader
    held_out: Reader | None = None
    decode: Decode | None = None

    @property
    def readers(self) -> tuple[Reader, ...]:
        return (self.reader,) if self.held_out is None else (self.reader, self.held_out)

    @property
    def on_device(self) -> bool:
        """Whether the device decodes pictures."""
        return self.decode is not None and self.decode.by == "gpu"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Decoded:
    """A batch whose pictures the device decodes."""

    batch: Batch
    x: torch.Tensor  # uint8 [n, H, W, C]
    failed: Sequence[int]  # rows that it could not decode
    done: torch.cuda.Event | None  # once it has happened, the other rows are there


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """A batch that was read, with its rows on the host or on the device."""

    batch: Batch
    x: np.ndarray | torch.Tensor
    preprocess: Preprocess | None  # arithmetic still to be done to x


class Meters:
    """How busy the stages of a training are, over all its epochs and validations."""

    def __init__(self, device: torch.device, *, decodes: bool = False) -> None:
        """`decodes` says that the device decodes pictures."""
        on_device = able(device).asynchronous
        self.read = Meter("read" if decodes else "read and decode")
        self.decode = Meter("decode")
        self.prepare = Meter("upload" if on_device and not decodes else "augment")
        self.steps = Meter("step", unit="device" if on_device else "thread")
        self._meters = [self.read, *([self.decode] if decodes else []), self.prepare, self.steps]

    def summary(self) -> dict[str, Any]:
        """What `summary_of` says of them."""
        return summary_of(self._meters)


class Intake:
    """Reads batches for one device. Several threads may read at once, each its own batches.

    On a GPU, use what arrives on `stream`.
    """

    def __init__(
        self, device: torch.device, readers: Sequence[Reader] = (), *, on_device: bool = False, batch_size: int = 1
    ) -> None:
        """For these readers and up to this `batch_size`. With `on_device`, the device decodes pictures."""
        self.device, self.stored = device, able(device).separate_memory or on_device
        self.stream = take_for(self, device, urgent=True) if able(device).streams else None
        self.meters = Meters(device, decodes=on_device)
        self._on_device = on_device
        self._decoders: dict[Recipe, Pool[PictureDecoder]] = {}
        self._lock = threading.Lock()  # of the dictionary
        self._buffers = self._memory(readers, batch_size) if self.stream is not None else None

    def batches(
        self,
        reader: Reader,
        start: int,
        *,
        batch_size: int,
        order: np.ndarray | None = None,
        crops: RandomCrops | None = None,
    ) -> Generator[Taken]:
        """Batches from a position of the reading order on. With `crops`, they hold random parts of pictures.

        The caller releases each `batch`. Raises DataError, OutOfMemory.
        """
        preprocess = reader.preprocess if self.stored else None
        encoded = self._on_device and reader.decodes
        source = reader.batches(
            start,
            batch_size=batch_size,
            order=order,
            wanted=Wanted(stored=preprocess is not None, encoded=encoded, crops=crops),
            buffers=None if preprocess is None else self._buffers,
            meter=self.meters.read,
        )
        if not encoded:
            with closing(source):
                for stored in source:
                    yield Taken(batch=stored, x=stored.x, preprocess=preprocess)
            return
        results = mapped(
            partial(self._decode, reader, crops),
            source,
            threads=_DECODERS,
            depth=_DECODED_AHEAD,
            meter=self.meters.decode,
            timed=False,
            name="nimble-decode",
        )
        with closing(results):
            for decoded in results:
                batch, pixels = self._completed(reader, decoded, crops)
                yield Taken(batch=batch, x=pixels, preprocess=preprocess)

    def end(self) -> None:
        """Wake every thread that waits for a buffer; its batches end."""
        if self._buffers is not None:
            self._buffers.end()

    def close(self) -> None:
        """Free the memory. Call it when no thread reads any more."""
        for pool in self._decoders.values():
            for decoder in pool:
                decoder.close()
        if self._buffers is not None:
            self._buffers.close()

    def _memory(self, readers: Sequence[Reader], batch_size: int) -> Buffers | None:
        """Pinned memory for the batches of these readers; None if none of them hands over stored records."""
        row_bytes = [
            reader.encoded_bytes
            if self._on_device and reader.decodes
            else int(np.prod(reader.preprocess.shape)) * np.dtype(reader.preprocess.dtype).itemsize
            for reader in readers
            if reader.preprocess is not None
        ]
        if not row_bytes:
            return None
        nbytes = batch_size * max(row_bytes)
        more = _DECODED_AHEAD + 1 if self._on_device else 0  # those that are decoded or wait for it
        most, fewest = _BUFFERS + more, _FEWEST_BUFFERS + more
        count = as_many(nbytes, most=most, fewest=fewest, limit_bytes=_BUFFER_BYTES)
        return pinned_buffers(nbytes, count, self.device)

    def _decode(self, reader: Reader, crops: RandomCrops | None, batch: Batch) -> _Decoded:
        """Decode a batch on the device, and release its memory on the host."""
        assert batch.pictures is not None
        done = None if self.stream is None else torch.cuda.Event()
        with ExitStack() as stack:
            stack.callback(batch.release)
            boxes = None if crops is None else crops.rectangles(batch.indexes, batch.pictures.sizes)
            taken = self._decoders_of(reader).take()
            assert taken is not None
            decoder, give_back = taken
            stack.callback(give_back)
            with self._on_stream(), self.meters.decode.busy():
                x = torch.empty((len(batch), *reader.recipe.shape), dtype=torch.uint8, device=self.device)
                after = None
                if self.stream is not None:
                    after = torch.cuda.Event()
                    after.record()  # work on this stream may still use the memory
                decoder.done = done
                failed = decoder.decode(batch.pictures, x, boxes=boxes, after=after) if len(batch) else ()
            return _Decoded(batch=batch, x=x, failed=failed, done=done)

    def _completed(self, reader: Reader, found: _Decoded, crops: RandomCrops | None) -> tuple[Batch, torch.Tensor]:
        """The batch without the records that turn out to be bad, and its pixels on the device, uint8 [n, H, W, C]."""
        x = found.x
        if self.stream is not None and found.done is not None:
            self.stream.wait_event(found.done)
        left, kept, pixels = redone(found.batch, found.failed, partial(reader.redo, crops=crops))
        with self._on_stream():
            put(pixels, x)
            if len(kept) < len(found.batch):
                x = x[torch.tensor(kept, dtype=torch.int64, device=self.device)]
        return left, x

    def _decoders_of(self, reader: Reader) -> Pool[PictureDecoder]:
        recipe = reader.recipe
        with self._lock:
            if recipe not in self._decoders:
                self._decoders[recipe] = decoders(partial(PictureDecoder, self.device, recipe), _DECODERS)
            return self._decoders[recipe]

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
