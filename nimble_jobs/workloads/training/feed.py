"""Batches on the device: read, uploaded and changed by a thread while the step before them runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from nimble_jobs.data import BadRecord, Reader
from nimble_jobs.errors import DataError
from nimble_jobs.workloads.training.pixels import DevicePixels, Pixels

T = TypeVar("T")

_AHEAD = 2  # batches that wait to be taken, at least
_FAR_AHEAD = 8  # at most: what the threads of this process take from each other is milliseconds
_AHEAD_BYTES = 64 << 20  # on the device, in between
_POLL_S = 0.1  # how soon a thread sees that nobody wants its batches any more
_END = object()

Places = Callable[[np.ndarray], np.ndarray]  # positions in the input -> see Augment.places


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """Records of one step, as they were read."""

    x: np.ndarray
    y: np.ndarray
    taken: int  # batches of the reading order up to and with this one
    records: int  # records of the reading order up to and with this one, good or bad
    bad: tuple[BadRecord, ...]  # since the batch before
    last: bool  # of the reading order
    places: np.ndarray | None = None  # where the pixels are to come from; see Augment.places


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """The same, on the device. Its tensors are valid until the next batch is asked for."""

    host: HostBatch
    x: torch.Tensor
    y: torch.Tensor


def read(
    reader: Reader,
    *,
    batch_size: int,
    order: np.ndarray | None = None,
    skip: int = 0,
    at_least: int = 1,
    classes: int | None = None,
    places: Places | None = None,
) -> Iterator[HostBatch]:
    """Batches from the `skip`-th on. Those with fewer than `at_least` good records are left out.

    Raises DataError for a label that the model has no class for.
    """
    waiting: dict[str, Any] | None = None
    total = reader.total if order is None else len(order)
    taken, bad = skip, list[BadRecord]()
    source = reader.batches(skip * batch_size, batch_size=batch_size, order=order, raw=reader.pixels is not None)
    with closing(source):  # type: ignore[type-var]  # a generator
        for batch in source:
            taken += 1
            bad += batch.bad
            if len(batch) < at_least or batch.labels is None:
                continue
            if waiting is not None:
                yield HostBatch(**waiting, last=False)
            if classes is not None:
                check_labels(batch.labels, classes)
            waiting = {"x": batch.x, "y": batch.labels, "taken": taken, "records": batch.stop, "bad": tuple(bad)}
            if places is not None:
                waiting["places"] = places(batch.indexes)
            bad = []
    if waiting is not None:  # what follows the last used batch is done with it
        waiting |= {"taken": taken, "records": total, "bad": (*waiting["bad"], *bad)}
        yield HostBatch(**waiting, last=True)


class Feed:
    """Batches of one segment after the other, an epoch or a validation, on the device.

    One thread reads, changes and uploads them ahead, also over the end of a segment: the next one begins at once. On
    CUDA buffers and stream stay the same throughout.
    """

    def __init__(
        self,
        segments: Iterable[Iterator[HostBatch]],
        pixels: Pixels,
        device: torch.device,
        *,
        batch_bytes: int = 0,  # of one batch on the device; what is small is prepared further ahead
    ) -> None:
        self._device = device
        self._ahead = max(_AHEAD, min(_FAR_AHEAD, _AHEAD_BYTES // max(1, batch_bytes)))
        flat = _flattened(segments)
        self._slots: list[_Slot] = []
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            # Those that wait, the one in use, the one being filled.
            self._slots = [_Slot(stream, device, pixels.on(device)) for _ in range(self._ahead + 2)]
            self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
            for slot in self._slots:
                self._free.put(slot)
            self._prepared = ahead(self._uploaded(flat), self._ahead)
        else:
            self._prepared = ahead(_changed(flat, pixels), self._ahead)

    def segment(self) -> Iterator[DeviceBatch]:
        """The batches of the next segment, to be taken to their end, or else to be followed by `close`."""
        for item in self._prepared:
            if item is None:
                return
            host, x, y, slot = item
            if slot is None:
                yield DeviceBatch(host=host, x=x, y=y)
                continue
            current = torch.cuda.current_stream(self._device)
            current.wait_event(slot.ready)
            yield DeviceBatch(host=host, x=x, y=y)
            slot.used.record(current)
            self._free.put(slot)

    def close(self) -> None:
        """End the thread. Raises nothing that was met ahead."""
        self._prepared.close()
        if self._slots:
            torch.cuda.current_stream(self._device).synchronize()  # buffers may be in use

    def _uploaded(self, batches: Iterator[HostBatch | None]) -> Iterator[_Prepared | None]:
        with torch.cuda.device(self._device), closing(batches):  # type: ignore[type-var]  # a generator
            for host in batches:
                if host is None:
                    yield None
                    continue
                slot = self._free.get()
                yield host, *slot.fill(host), slot


class _Slot:
    """Buffers for one batch on both sides; those on the host are made when the first batch is known."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, pixels: DevicePixels) -> None:
        self.ready, self.used = torch.cuda.Event(), torch.cuda.Event()
        self._stream, self._device, self._pixels = stream, device, pixels
        self._pinned: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._held: tuple[torch.Tensor, ...] = ()  # on the device, until the next batch

    def fill(self, host: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        self.used.synchronize()
        with torch.cuda.stream(self._stream):
            x = self._sent("x", host.x)
            y = self._sent("y", host.y)
            places = None if host.places is None else self._sent("places", host.places)
            values = self._pixels(x, places)
            self.ready.record()
        self._held = (values, y)
        return values, y

    def _sent(self, name: str, array: np.ndarray) -> torch.Tensor:
        found = _tensor(array)
        pinned = self._pinned.get((name, found.dtype))
        if pinned is None or len(found) > len(pinned):
            pinned = self._pinned[name, found.dtype] = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        return pinned[: len(found)].copy_(found).to(self._device, non_blocking=True)


_Prepared = tuple[HostBatch, torch.Tensor, torch.Tensor, _Slot | None]


def _flattened(segments: Iterable[Iterator[HostBatch]]) -> Iterator[HostBatch | None]:
    """The batches of all segments; None after each."""
    for segment in segments:
        with closing(segment):  # type: ignore[type-var]  # a generator
            yield from segment
        yield None


def _changed(batches: Iterator[HostBatch | None], pixels: Pixels) -> Iterator[_Prepared | None]:
    with closing(batches):  # type: ignore[type-var]  # a generator
        for host in batches:
            yield None if host is None else (host, _tensor(pixels(host.x, host.places)), _tensor(host.y), None)


def ahead(source: Iterator[T], depth: int = _AHEAD) -> Generator[T]:
    """The items of `source`, up to `depth` made ahead by a thread. Closing the generator ends the thread."""
    line: queue.Queue[Any] = queue.Queue(maxsize=depth)
    unwanted = threading.Event()

    def put(item: object) -> bool:
        while not unwanted.is_set():
            try:
                line.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            with closing(source):  # type: ignore[type-var]  # a generator
                for item in source:
                    if not put(item):
                        return
            put(_END)
        except BaseException as e:  # noqa: BLE001 - raised where the items are taken
            put(e)

    thread = threading.Thread(target=work, name="nimble-feed", daemon=True)
    thread.start()
    try:
        while (item := line.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        unwanted.set()
        thread.join()


def check_labels(labels: np.ndarray, classes: int) -> None:
    """Raises DataError for a label, of class numbers, that the model has no class for."""
    if len(labels) and int(labels.max()) >= classes:
        raise DataError(
            f"input.fields.label: found the label {labels.max()}; "
            f"expected 0 to {classes - 1}, as the model has {classes} classes"
        )


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
