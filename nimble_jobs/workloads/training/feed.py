"""Batches on the device: read, uploaded and changed by a thread while the step before them runs."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from nimble_jobs.pipeline import Meter, ahead
from nimble_jobs.workloads.training.pixels import DevicePixels, Pixels
from nimble_jobs.workloads.training.reading import HostBatch, Lot
from nimble_jobs.workloads.training.segments import Segment, in_turn

_AHEAD = 2  # lots that wait to be taken, at least
_FAR_AHEAD = 8  # batches, unless two lots have more: what threads of a process take from each other is milliseconds
_AHEAD_BYTES = 64 << 20  # on the device, in between
_TOGETHER = 8  # batches of a lot, at most
_LOT_BYTES = 8 << 20
_SIGNED = {"uint16": np.int16, "uint32": np.int32}
_ALIGNED = 256  # bytes: more than any kernel asks for


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """Records of one step, on the device. Its tensors are valid until the next batch is asked for."""

    host: HostBatch
    x: torch.Tensor
    y: torch.Tensor


def lot_size(batch_bytes: int, device: torch.device) -> int:
    """How many batches of so many bytes each are to make a lot; one where a step runs on the host itself."""
    if device.type == "cpu":
        return 1
    return max(1, min(_TOGETHER, _LOT_BYTES // max(1, batch_bytes)))


class Feed:
    """Batches of one segment after the other, an epoch or a validation, on the device.

    One thread reads, changes and uploads them ahead, also over the end of a segment: the next one begins at once. On
    CUDA buffers and stream stay the same throughout.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        pixels: Pixels,
        device: torch.device,
        *,
        batch_bytes: int = 0,  # of one batch on the device; what is small is prepared further ahead
        together: int = 1,  # batches of a lot
        prepare: Meter | None = None,
        steps: Meter | None = None,
        stream: torch.cuda.Stream | None = None,  # that batches are made on; None: one of its own
    ) -> None:
        self._device = device
        self._prepare, self._steps = prepare or Meter("augment"), steps or Meter("steps")
        self._ahead = max(_AHEAD, min(_FAR_AHEAD, _AHEAD_BYTES // max(1, batch_bytes)) // together)
        self._slots: list[_Slot] = []
        lots = in_turn(segments)
        if device.type == "cuda":
            stream = stream or torch.cuda.Stream(device)
            # Those that wait, the one in use, the one being filled.
            self._slots = [_Slot(stream, device, pixels.on(device)) for _ in range(self._ahead + 2)]
            self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
            for slot in self._slots:
                self._free.put(slot)
            prepared = self._uploaded(lots)
        else:
            prepared = self._changed(lots, pixels)
        self._prepare.limit = self._ahead
        self._prepared = ahead(prepared, self._ahead, name="nimble-feed")

    def segment(self) -> Iterator[DeviceBatch]:
        """The batches of the next segment, to be taken to their end, or else to be followed by `close`."""
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
                self._steps.worked(time.perf_counter() - began, len(lot.batches))

    def close(self) -> None:
        """End the threads. Raises nothing that was met ahead."""
        self._prepared.close()
        if self._slots:
            torch.cuda.current_stream(self._device).synchronize()  # buffers may be in use

    def _uploaded(self, lots: Generator[Lot | None]) -> Generator[_Prepared | None]:
        before: _Slot | None = None
        with torch.cuda.device(self._device), closing(lots):
            for lot in lots:
                if lot is None:
                    yield None
                    continue
                slot = self._free.get()
                slot.wait(self._steps)
                with self._prepare.busy():
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
                with self._prepare.busy():
                    x = _tensor(pixels(lot.x, lot.places))
                yield lot, x, _tensor(lot.y), None


class _Slot:
    """Buffers for one lot on both sides; those on the host are made when the first lot is known."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, pixels: DevicePixels) -> None:
        self._ready, self._copied = torch.cuda.Event(), torch.cuda.Event()
        self._begun, self._used = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._batches = 0  # that the device was given since the slot was filled
        self._stream, self._device, self._pixels = stream, device, pixels
        self._pinned: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._held: tuple[torch.Tensor, ...] = ()  # on the device, until the next lot
        self._release: Callable[[], None] | None = None  # of the reader's buffer

    def wait(self, steps: Meter) -> None:
        """Until the device is done with the lot before; `steps` counts what it did with it."""
        if self._batches:
            self._used.synchronize()
            steps.worked(self._begun.elapsed_time(self._used) / 1e3, self._batches)
            self._batches = 0

    def fill(self, lot: Lot) -> tuple[torch.Tensor, torch.Tensor]:
        """Send a lot on its way. `sent` is to be called before many others are read."""
        with torch.cuda.stream(self._stream):
            if isinstance(lot.x, torch.Tensor):
                x = lot.x
            elif lot.release is not None:  # its memory is pinned
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
        """Give the reader's buffer back, once it was copied."""
        release, self._release = self._release, None
        if release is not None:
            self._copied.synchronize()
            release()

    def begin(self) -> None:
        """The current stream is about to use the lot."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._ready)
        self._begun.record(stream)

    def end(self, batches: int) -> None:
        """All that uses the lot is on the current stream."""
        self._used.record(torch.cuda.current_stream(self._device))
        self._batches = batches

    def _sent(self, name: str, array: np.ndarray) -> torch.Tensor:
        found = _tensor(array)
        pinned = self._pinned.get((name, found.dtype))
        if pinned is None or len(found) > len(pinned):
            pinned = self._pinned[name, found.dtype] = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        return pinned[: len(found)].copy_(found).to(self._device, non_blocking=True)


_Prepared = tuple[Lot, torch.Tensor, torch.Tensor, _Slot | None]


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The same bits; torch computes with few unsigned types, so `Preprocessed` expects signed ones."""
    array = array.view(_SIGNED.get(array.dtype.name, array.dtype))
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())


def _part(whole: torch.Tensor, rows: slice) -> torch.Tensor:
    """Those rows, as aligned as if they were alone: some kernels compute in another order where they are not."""
    part = whole[rows]
    return part if rows.start == 0 or part.data_ptr() % _ALIGNED == 0 else part.clone()
