"""What a training reads, in which order: epochs and validations one after the other, until they are on the device."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from nimble_jobs.errors import DataError
from nimble_jobs.spec import JobSpec, TrainSpec
from nimble_jobs.workloads.training.batches.augment import Augment, Pixels
from nimble_jobs.workloads.training.batches.feed import DeviceBatch, Feed, lot_size
from nimble_jobs.workloads.training.batches.intake import Data, Intake
from nimble_jobs.workloads.training.batches.lots import HELD_OUT, Checks, Draws, Lot, read
from nimble_jobs.workloads.training.batches.together import Share

AT_LEAST = 2  # good records in a batch: statistics over a batch need two
_NEAR = 2  # lots before its end, a segment has asked for all that it will read


class Sampler:
    """Batches of shuffled records, the same for equal seed, epoch and number of records.

    `last_batch` says what happens to the records at the end that fill no batch: keep (a short batch) or drop. Too few
    to train on are `left_out`, unless there are no others.
    """

    def __init__(self, total: int, batch_size: int, *, seed: int, last_batch: Literal["keep", "drop"] = "keep") -> None:
        self.total = total
        self.batch_size = batch_size
        self._seed = seed
        whole, rest = divmod(total, batch_size)
        few = whole > 0 and rest < AT_LEAST
        self.left_out = rest if few and last_batch == "keep" else 0  # in one epoch, though they were to be kept
        self.batches = whole if few or last_batch == "drop" else -(-total // batch_size)  # in one epoch
        self.records = min(total, self.batches * batch_size)  # in one epoch

    @classmethod
    def of(cls, spec: JobSpec, total: int) -> Sampler:
        """The sampler that a training's spec asks for."""
        assert spec.train is not None
        return cls(total, spec.input.batch_size, seed=spec.model.seed, last_batch=spec.train.last_batch)

    def order(self, epoch: int) -> np.ndarray:
        """Positions of the epoch's records in the input, int64 [records]; the first epoch is 1."""
        return np.random.default_rng([self._seed, epoch]).permutation(self.total)[: self.records]


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """What each epoch of a training reads, and whether a validation follows it."""

    train: TrainSpec
    data: Data
    sampler: Sampler
    augment: Augment
    pixels: Pixels
    share: Share = Share()  # noqa: RUF009 - frozen  # of each batch that is read here

    @classmethod
    def of(cls, spec: JobSpec, data: Data, share: Share = Share()) -> Epochs:  # noqa: B008 - frozen
        """The epochs that a spec asks for, of which `share` is read.

        Raises DataError if no batch is left, and as `Augment` does.
        """
        train, reader, seed = spec.train, data.reader, spec.model.seed
        assert train is not None
        sampler = Sampler.of(spec, reader.total)
        if not sampler.batches:
            raise DataError(
                f"train.last_batch: drop leaves no batch, because {reader.total} records do not fill one of "
                f"{sampler.batch_size}; expected keep, or a smaller input.batch_size"
            )
        augment = Augment(train.augment, reader.signature, seed=seed, decodes=reader.decodes)
        pixels = Pixels(spec.input.transform, padding=augment.padding)
        return cls(train=train, data=data, sampler=sampler, augment=augment, pixels=pixels, share=share)

    @property
    def batch_size(self) -> int:
        """Records of a whole batch that are read here."""
        return self.share.size(self.sampler.batch_size)

    def validated(self, epoch: int) -> bool:
        """Whether a validation follows this epoch."""
        return self.train.validation is not None and epoch % self.train.validation.every_epochs == 0

    def segments(self, intake: Intake, checks: Checks, *, together: int, epoch: int, batch: int) -> Iterator[Segment]:
        """Each epoch, and the validation after it, from a batch of an epoch on."""
        reading = partial(read, intake=intake, batch_size=self.batch_size, together=together)
        whole = self.sampler.batch_size
        for number in range(epoch, self.train.epochs + 1):
            order = self.share.of(self.sampler.order(number), whole, at_least=AT_LEAST)
            draws = Draws(
                order=order,
                places=partial(self.augment.places, epoch=number) if self.augment else None,
                crops=self.augment.crops(number),
            )
            skip = batch if number == epoch else 0
            lots = reading(self.data.reader, draws=draws, skip=skip, at_least=AT_LEAST, checks=checks)
            yield Segment(lots=lots, batches=-(-len(order) // self.batch_size))
            if self.data.held_out is not None and self.validated(number):
                total = self.data.held_out.total
                mine = self.share.of(np.arange(total), whole, at_least=1) if self.share.count > 1 else None
                lots = reading(self.data.held_out, draws=Draws(order=mine), checks=replace(checks, field=HELD_OUT))
                records = total if mine is None else len(mine)
                yield Segment(lots=lots, batches=-(-records // self.batch_size))


class Batches:
    """All batches of a training, on its device: the rest of an epoch, its validation, the next epoch, and so on."""

    def __init__(self, epochs: Epochs, device: torch.device, checks: Checks, *, epoch: int = 1, batch: int = 0) -> None:
        """They begin with the batch that follows `batch` others of an epoch."""
        data, size = epochs.data, epochs.batch_size
        batch_bytes = 4 * size * math.prod(data.reader.signature.shape)
        together = lot_size(batch_bytes, device) if all(reader.quick for reader in data.readers) else 1
        self._intake = Intake(device, data.readers, on_device=data.on_device, batch_size=size * together)
        lots = in_turn(epochs.segments(self._intake, checks, together=together, epoch=epoch, batch=batch))
        self._feed = Feed(lots, epochs.pixels, self._intake, batch_bytes=batch_bytes, together=together)
        self.meters = self._intake.meters

    def segment(self) -> Iterator[DeviceBatch]:
        """The batches of the next segment. Take all of them, or call `close`."""
        return self._feed.segment()

    def close(self) -> None:
        """End all threads and free the memory."""
        self._intake.end()
        try:
            self._feed.close()
        finally:
            self._intake.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """An epoch, or the rest of one, or a validation."""

    lots: Generator[Lot]
    batches: int  # of its reading order, from the order's beginning


def in_turn(segments: Iterable[Segment]) -> Generator[Lot | None]:
    """The lots of all segments; None after each.

    Readers work ahead, but only within their segment. So a thread begins the next segment as soon as this one has asked
    for its last records, and reading and decoding go on without a pause. Closing the generator closes both segments.
    """
    waiting = iter(segments)
    opened = deque[_Begun]()  # the one that is read, and perhaps the one after it

    def begin() -> None:
        segment = next(waiting, None)
        if segment is not None:
            opened.append(_Begun(segment))

    try:
        begin()
        while opened:
            now = opened[0]
            for lot in now:
                if len(opened) == 1 and now.batches - lot.batches[-1].taken <= _NEAR * len(lot.batches):
                    begin()
                yield lot
            yield None
            opened.popleft().close()
            if not opened:
                begin()
    finally:
        for segment in opened:
            segment.close()


class _Begun:
    """A segment whose first lot is being read."""

    def __init__(self, segment: Segment) -> None:
        self.batches = segment.batches
        self._lots = segment.lots
        self._first: Future[list[Lot]] = Future()
        self._thread = threading.Thread(target=self._begin, name="nimble-begin", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Lot]:
        yield from self._first.result()
        yield from self._lots

    def close(self) -> None:
        """End the segment's reading."""
        self._thread.join()
        self._lots.close()

    def _begin(self) -> None:
        try:
            self._first.set_result([lot for lot in (next(self._lots, None),) if lot is not None])
        except BaseException as e:  # noqa: BLE001 - `__iter__` raises it
            self._first.set_exception(e)
