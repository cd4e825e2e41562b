"""Batches on the device: read, uploaded and changed by a thread while the step before them runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from nimble_jobs.data import BadRecord, Batch, Reader
from nimble_jobs.errors import DataError
from nimble_jobs.planner.limits import Limits
from nimble_jobs.workloads.training.pixels import DevicePixels, Pixels

T = TypeVar("T")

TRAINED_ON = "input.fields.label"
HELD_OUT = "train.validation.source"

_AHEAD = 2  # lots that wait to be taken, at least
_FAR_AHEAD = 8  # batches, unless two lots have more: what threads of a process take from each other is milliseconds
_AHEAD_BYTES = 64 << 20  # on the device, in between
_TOGETHER = 8  # batches of a lot, at most
_LOT_BYTES = 8 << 20
_ALIGNED = 256  # bytes: more than any kernel asks for
_POLL_S = 0.1  # how soon a thread sees that nobody wants its batches any more
_END = object()

Places = Callable[[np.ndarray], np.ndarray]  # positions in the input -> see Augment.places


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """Records of one step: which rows of their lot they are, and where the reading then is."""

    rows: slice
    taken: int  # batches of the reading order up to and with this one
    records: int  # records of the reading order up to and with this one, good or bad
    bad: tuple[BadRecord, ...]  # since the batch before
    last: bool = False  # of the reading order


@dataclass(frozen=True, kw_only=True)
class Lot:
    """Consecutive batches that are read, sent and changed together, which costs little more than one of them does."""

    batches: tuple[HostBatch, ...]
    x: np.ndarray
    y: np.ndarray
    places: np.ndarray | None  # where the pixels are to come from; see Augment.places


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


def read(
    reader: Reader,
    *,
    batch_size: int,
    order: np.ndarray | None = None,
    skip: int = 0,
    at_least: int = 1,
    classes: int | None = None,
    places: Places | None = None,
    together: int = 1,
    field: str = TRAINED_ON,
    limits: Limits = Limits(),  # noqa: B008
) -> Iterator[Lot]:
    """Batches from the `skip`-th on, in lots of up to `together`. Those with fewer than `at_least` good records are
    left out.

    Raises DataError, naming the spec's `field`, for a label that the model has no class for.
    """
    waiting: Lot | None = None
    total = reader.total if order is None else len(order)
    taken, bad = skip, list[BadRecord]()
    size = batch_size * together
    raw = reader.pixels is not None
    batches_read = reader.batches(skip * batch_size, batch_size=size, order=order, raw=raw)
    source = _within(batches_read, reader, limits, field)
    with closing(source):  # type: ignore[type-var]  # a generator
        for found in source:
            batches = list[HostBatch]()
            wrong: DataError | None = None
            for rows, records, missing in _cut(found, order, batch_size):
                taken += 1
                bad += missing
                if rows.stop - rows.start < at_least or found.labels is None:
                    continue
                try:
                    if classes is not None:
                        check_labels(found.labels[rows], classes, field, partial(_named, found, reader, rows.start))
                except DataError as e:  # after the batches before it
                    wrong = e
                    break
                batches.append(HostBatch(rows=rows, taken=taken, records=records, bad=tuple(bad)))
                bad = []
            if batches:
                if waiting is not None:
                    yield waiting
                assert found.labels is not None
                moved = None if places is None else places(found.indexes)
                waiting = Lot(batches=tuple(batches), x=found.x, y=found.labels, places=moved)
            if wrong is not None:
                if waiting is not None:
                    yield waiting
                raise wrong
    if waiting is not None:
        last = waiting.batches[-1]  # what follows the last used batch is done with it
        last = replace(last, taken=taken, records=total, bad=(*last.bad, *bad), last=True)
        yield replace(waiting, batches=(*waiting.batches[:-1], last))


def _within(batches: Iterator[Batch], reader: Reader, limits: Limits, field: str) -> Iterator[Batch]:
    """The batches, each checked before it is sent to the device. Raises DataError."""
    with closing(batches):  # type: ignore[type-var]  # a generator
        for batch in batches:
            check_numbers(batch, reader, limits, field)
            yield batch


def _named(batch: Batch, reader: Reader, first: int, row: int) -> str:
    return record_name(batch, reader, first + row)


def _cut(found: Batch, order: np.ndarray | None, batch_size: int) -> Iterator[tuple[slice, int, list[BadRecord]]]:
    """The batches that were read as one: rows, records of the reading order up to and with it, and its bad ones."""
    bad = {b.index: b for b in found.bad}
    row = 0
    for first in range(found.start, found.stop, batch_size):
        stop = min(first + batch_size, found.stop)
        missing = list[BadRecord]()
        if bad:
            indexes = range(first, stop) if order is None else order[first:stop].tolist()
            missing = [bad[index] for index in indexes if index in bad]
        rows = slice(row, row + stop - first - len(missing))
        yield rows, stop, missing
        row = rows.stop


class Feed:
    """Batches of one segment after the other, an epoch or a validation, on the device.

    One thread reads, changes and uploads them ahead, also over the end of a segment: the next one begins at once. On
    CUDA buffers and stream stay the same throughout.
    """

    def __init__(
        self,
        segments: Iterable[Iterator[Lot]],
        pixels: Pixels,
        device: torch.device,
        *,
        batch_bytes: int = 0,  # of one batch on the device; what is small is prepared further ahead
        together: int = 1,  # batches of a lot
    ) -> None:
        self._device = device
        self._ahead = max(_AHEAD, min(_FAR_AHEAD, _AHEAD_BYTES // max(1, batch_bytes)) // together)
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
            lot, x, y, slot = item
            if slot is not None:
                torch.cuda.current_stream(self._device).wait_event(slot.ready)
            for host in lot.batches:
                yield DeviceBatch(host=host, x=_part(x, host.rows), y=_part(y, host.rows))
            if slot is not None:
                slot.used.record(torch.cuda.current_stream(self._device))
                self._free.put(slot)

    def close(self) -> None:
        """End the thread. Raises nothing that was met ahead."""
        self._prepared.close()
        if self._slots:
            torch.cuda.current_stream(self._device).synchronize()  # buffers may be in use

    def _uploaded(self, lots: Iterator[Lot | None]) -> Iterator[_Prepared | None]:
        with torch.cuda.device(self._device), closing(lots):  # type: ignore[type-var]  # a generator
            for lot in lots:
                if lot is None:
                    yield None
                    continue
                slot = self._free.get()
                yield lot, *slot.fill(lot), slot


class _Slot:
    """Buffers for one lot on both sides; those on the host are made when the first lot is known."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, pixels: DevicePixels) -> None:
        self.ready, self.used = torch.cuda.Event(), torch.cuda.Event()
        self._stream, self._device, self._pixels = stream, device, pixels
        self._pinned: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._held: tuple[torch.Tensor, ...] = ()  # on the device, until the next lot

    def fill(self, lot: Lot) -> tuple[torch.Tensor, torch.Tensor]:
        self.used.synchronize()
        with torch.cuda.stream(self._stream):
            x = self._sent("x", lot.x)
            y = self._sent("y", lot.y)
            places = None if lot.places is None else self._sent("places", lot.places)
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


_Prepared = tuple[Lot, torch.Tensor, torch.Tensor, _Slot | None]


def _flattened(segments: Iterable[Iterator[Lot]]) -> Iterator[Lot | None]:
    """The lots of all segments; None after each."""
    for segment in segments:
        with closing(segment):  # type: ignore[type-var]  # a generator
            yield from segment
        yield None


def _changed(lots: Iterator[Lot | None], pixels: Pixels) -> Iterator[_Prepared | None]:
    with closing(lots):  # type: ignore[type-var]  # a generator
        for lot in lots:
            yield None if lot is None else (lot, _tensor(pixels(lot.x, lot.places)), _tensor(lot.y), None)


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


def check_labels(
    labels: np.ndarray, classes: int, field: str = TRAINED_ON, named: Callable[[int], str] | None = None
) -> None:
    """Raises DataError, naming the spec's field, for a label, of class numbers, that the model has no class for.
    `named` says of a row which record it is.
    """
    if len(labels) and int(labels.max()) >= classes:
        row = int(labels.argmax())
        of = f" of {named(row)}" if named else ""
        raise DataError(
            f"{field}: found the label {labels[row]}{of}; expected 0 to {classes - 1}, "
            f"as the model has {classes} classes"
        )


def check_numbers(batch: Batch, reader: Reader, limits: Limits, field: str) -> None:
    """Raises DataError, naming the record, for a whole number that the model has no row of a table for."""
    for row, why in limits.wrong(batch.x).items():
        source = "input.source" if field == TRAINED_ON else field
        raise DataError(f"{source}: {record_name(batch, reader, row)} {why}")


def record_name(batch: Batch, reader: Reader, row: int) -> str:
    """A record's id and its place."""
    return f"record {batch.ids[row]} ({reader.place(int(batch.indexes[row]))})"


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())


def _part(whole: torch.Tensor, rows: slice) -> torch.Tensor:
    """Those rows, as aligned as if they were alone: some kernels compute in another order where they are not."""
    part = whole[rows]
    return part if rows.start == 0 or part.data_ptr() % _ALIGNED == 0 else part.clone()
