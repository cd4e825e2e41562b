"""Batches on the device: read, changed and uploaded by a thread while the step before them runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from nimble_jobs.data import BadRecord, Reader
from nimble_jobs.errors import DataError

T = TypeVar("T")

_AHEAD = 2  # batches that wait to be taken
_POLL_S = 0.1  # how soon a thread sees that nobody wants its batches any more
_END = object()

Change = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (records, their positions in the input) -> records


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """Records of one step, read and changed."""

    x: np.ndarray
    y: np.ndarray
    taken: int  # batches of the reading order up to and with this one
    records: int  # records of the reading order up to and with this one, good or bad
    bad: tuple[BadRecord, ...]  # since the batch before
    last: bool  # of the reading order


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
    change: Change | None = None,
) -> Iterator[HostBatch]:
    """Batches from the `skip`-th on. Those with fewer than `at_least` good records are left out.

    Raises DataError for a label that the model has no class for.
    """
    waiting: dict[str, Any] | None = None
    total = reader.total if order is None else len(order)
    taken, bad = skip, list[BadRecord]()
    source = reader.batches(skip * batch_size, batch_size=batch_size, order=order)
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
            x = batch.x if change is None else change(batch.x, batch.indexes)
            waiting = {"x": x, "y": batch.labels, "taken": taken, "records": batch.stop, "bad": tuple(bad)}
            bad = []
    if waiting is not None:  # what follows the last used batch is done with it
        waiting |= {"taken": taken, "records": total, "bad": (*waiting["bad"], *bad)}
        yield HostBatch(**waiting, last=True)


def feed(batches: Iterator[HostBatch], device: torch.device) -> Iterator[DeviceBatch]:
    """The batches on the device, prepared ahead. Closing the generator ends its thread."""
    if device.type == "cuda":
        return _uploaded(batches, device)
    return _plain(batches)


def _plain(batches: Iterator[HostBatch]) -> Iterator[DeviceBatch]:
    with closing(ahead(batches)) as prepared:
        for host in prepared:
            yield DeviceBatch(host=host, x=_tensor(host.x), y=_tensor(host.y))


@dataclass(kw_only=True)
class _Slot:
    """Buffers for one batch on both sides, made when the first batch is known."""

    ready: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    used: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # host, device

    def fill(self, host: HostBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        arrays = (host.x, host.y)
        if not self.buffers or len(host.x) > len(self.buffers[0][0]):
            self.buffers = [_buffers(array, device) for array in arrays]
        sent = []
        for array, (pinned, there) in zip(arrays, self.buffers, strict=True):
            pinned[: len(array)].copy_(_tensor(array))
            sent.append(there[: len(array)].copy_(pinned[: len(array)], non_blocking=True))
        return sent[0], sent[1]


def _buffers(array: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pinned = torch.empty(array.shape, dtype=_tensor(array[:0]).dtype, pin_memory=True)
    return pinned, torch.empty_like(pinned, device=device)


def _uploaded(batches: Iterator[HostBatch], device: torch.device) -> Iterator[DeviceBatch]:
    stream = torch.cuda.Stream(device)
    free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
    for _ in range(_AHEAD + 2):  # those that wait, the one in use, the one being filled
        free.put(_Slot())

    def upload() -> Iterator[tuple[HostBatch, _Slot, torch.Tensor, torch.Tensor]]:
        with torch.cuda.device(device), torch.cuda.stream(stream), closing(batches):  # type: ignore[type-var]
            for host in batches:
                slot = free.get()
                slot.used.synchronize()
                x, y = slot.fill(host, device)
                slot.ready.record()
                yield host, slot, x, y

    with closing(ahead(upload())) as prepared:
        for host, slot, x, y in prepared:
            current = torch.cuda.current_stream(device)
            current.wait_event(slot.ready)
            yield DeviceBatch(host=host, x=x, y=y)
            slot.used.record(current)
            free.put(slot)


def ahead(source: Iterator[T]) -> Generator[T]:
    """The items of `source`, up to two made ahead by a thread. Closing the generator ends the thread."""
    line: queue.Queue[Any] = queue.Queue(maxsize=_AHEAD)
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
