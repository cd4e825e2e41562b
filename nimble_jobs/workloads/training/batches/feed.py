"""Batches on the device: a thread uploads and changes them while earlier steps run."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from nimble_jobs.engine.device import able
from nimble_jobs.pipeline import Meter, ahead
from nimble_jobs.preprocess import bits
from nimble_jobs.workloads.training.batches.augment import DevicePixels, Pixels
from nimble_jobs.workloads.training.batches.intake import Intake
from nimble_jobs.workloads.training.batches.lots import HostBatch, Lot

_AHEAD = 2  # lots that wait to be taken, at least
_FAR_AHEAD = 8  # batches that wait if they are small: threads of one process delay each other by milliseconds
_AHEAD_BYTES = 64 << 20  # on the device, of batches that wait
_TOGETHER = 8  # batches of a lot, at most
_LOT_BYTES = 8 << 20  # of a lot, at most, unless one batch is larger
_ALIGNED = 256  # bytes; no kernel asks for more


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """The records of one batch, on the device. Its tensors are valid until you ask for the next batch."""

    host: HostBatch
    x: torch.Tensor
    y: torch.Tensor


def lot_size(batch_bytes: int, device: torch.device) -> int:
    """How many batches of `batch_bytes` each make a lot; one if the steps run on the host."""
    if not able(device).asynchronous:
        return 1
    return max(1, min(_TOGETHER, _LOT_BYTES // max(1, batch_bytes)))


class Feed:
    """Puts lots on the device and hands out their batches, one segment (an epoch or a validation) after the other.

    One thread works ahead, also over the end of a segment. On CUDA, buffers and stream stay the same throughout.
    """

    def __init__(
        self, lots: Generator[Lot | None], pixels: Pixels, intake: Intake, *, batch_bytes: int = 0, together: int = 1
    ) -> None:
        """`lots` come from `intake`, with None after each segment and up to `together` batches in a lot.

        Batches of few `batch_bytes` are prepared further ahead.
        """
        self._device, self._meters = intake.device, intake.meters
        self._ahead = max(_AHEAD, min(_FAR_AHEAD, _AHEAD_BYTES // max(1, batch_bytes)) // together)
        self._slots: list[_Slot] = []
        if intake.stream is not None:
            # one for each lot that waits, one in use, one being filled
            changes = [pixels.on(intake.device) for _ in range(self._ahead + 2)]
            self._slots = [_Slot(intake.stream, intake.device, change) for change in changes]
            self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
            for slot in self._slots:
                self._free.put(slot)
            prepared = self._uploaded(lots)
        else:
            prepared = self._changed(lots, pixels)
        self._meters.prepare.limit = self._ahead
        self._prepared = ahead(prepared, self._ahead, name="nimble-feed")

    def segment(self) -> Iterator[DeviceBatch]:
        """The batches of the next segment. Take all of them, or call `close`."""
        for item in self._prepared:
            if item is None:
                return
            lot, x, y, slot = item
            began = time.perf_counter()
            if slot is not None:
                slot.begin()
            for host in lot.batches:
                yield DeviceBatch(host=host, x=_part(x, host.rows), y=_part(y, host.rows))
            if slot is not None:
                slot.end(len(lot.batches))
                self._free.put(slot)
            else:
                self._meters.steps.worked(time.perf_counter() - began, len(lot.batches))

    def close(self) -> None:
        """End the threads. An error of a batch that nobody asked for is not raised."""
        self._prepared.close()
        if self._slots:
            torch.cuda.current_stream(self._device).synchronize()  # steps may still read the buffers

    def _uploaded(self, lots: Generator[Lot | None]) -> Generator[_Prepared | None]:
        before: _Slot | None = None
        with torch.cuda.device(self._device), closing(lots):
            for lot in lots:
                if lot is None:
                    yield None
                    continue
                slot = self._free.get()
                slot.wait(self._meters.steps)
                with self._meters.prepare.busy():
                    x, y = slot.fill(lot)
                    if before is not None:
                        before.sent()
                before = slot
                yield lot, x, y, slot

    def _changed(self, lots: Generator[Lot | None], pixels: Pixels) -> Generator[_Prepared | None]:
        with closing(lots):
            for lot in lots:
                if lot is None:
                    yield None
                    continue
                assert isinstance(lot.x, np.ndarray)
                with self._meters.prepare.busy():
                    x = _tensor(pixels(lot.x, lot.places))
                yield lot, x, _tensor(lot.y), None


class _Slot:
    """Buffers for one lot on the host and on the device. The host's are made once a lot shows their size."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, pixels: DevicePixels) -> None:
        self._ready, self._copied = torch.cuda.Event(), torch.cuda.Event()
        self._begun, self._used = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._batches = 0  # handed to the device since the slot was filled
        self._stream, self._device, self._pixels = stream, device, pixels
        self._pinned: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._held: tuple[torch.Tensor, ...] = ()  # on the device, until the next lot
        self._release: Callable[[], None] | None = None  # of the reader's buffer

    def wait(self, steps: Meter) -> None:
        """Wait until the device is done with the lot before; `steps` counts the time that it took."""
        if self._batches:
            self._used.synchronize()
            steps.worked(self._begun.elapsed_time(self._used) / 1e3, self._batches)
            self._batches = 0

    def fill(self, lot: Lot) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin to upload a lot; the result is what the model takes, and the labels.

        Call `sent` soon: until then the lot keeps a buffer of the reader.
        """
        with torch.cuda.stream(self._stream):
            if isinstance(lot.x, torch.Tensor):
                x = lot.x
            elif lot.release is not None:  # the reader's buffer is pinned
                x, self._release = _tensor(lot.x).to(self._device, non_blocking=True), lot.release
            else:
                x = self._sent("x", lot.x)
            y = self._sent("y", lot.y)
            places = None if lot.places is None else self._sent("places", lot.places)
            self._copied.record()
            values = self._pixels(x, places, lot.preprocess)
            self._ready.record()
        self._held = (x, values, y)
        return values, y

    def sent(self) -> None:
        """Wait until the reader's buffer is copied, and give it back."""
        release, self._release = self._release, None
        if release is not None:
            self._copied.synchronize()
            release()

    def begin(self) -> None:
        """Have the current stream wait for the lot; call it before the lot is used."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._ready)
        self._begun.record(stream)

    def end(self, batches: int) -> None:
        """Note that all work on the lot is on the current stream now."""
        self._used.record(torch.cuda.current_stream(self._device))
        self._batches = batches

    def _sent(self, name: str, array: np.ndarray) -> torch.Tensor:
        host = _tensor(array)
        pinned = self._pinned.get((name, host.dtype))
        if pinned is None or len(host) > len(pinned):
            pinned = self._pinned[name, host.dtype] = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        return pinned[: len(host)].copy_(host).to(self._device, non_blocking=True)


_Prepared = tuple[Lot, torch.Tensor, torch.Tensor, _Slot | None]


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The same bits as a tensor, in a type that torch computes with."""
    array = bits(array)
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())


def _part(whole: torch.Tensor, rows: slice) -> torch.Tensor:
    """These rows, aligned like a tensor of their own: some kernels compute in another order if they are not."""
    part = whole[rows]
    return part if rows.start == 0 or part.data_ptr() % _ALIGNED == 0 else part.clone()
