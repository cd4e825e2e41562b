"""Records in the order of a training: read, checked, and cut into the batches of steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data import BadRecord, Batch, Reader
from nimble_jobs.errors import DataError
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.workloads.training.batches.intake import Intake, Taken

TRAINED_ON = "input.fields.label"
HELD_OUT = "train.validation.source"

Places = Callable[[np.ndarray], np.ndarray]  # positions in the input -> see Augment.places


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """The records of one batch: their rows in a lot, and how far the reading order has then been read."""

    rows: slice
    taken: int  # batches of the reading order up to and with this one
    records: int  # records of the reading order up to and with this one, good or bad
    bad: tuple[BadRecord, ...]  # since the batch before
    last: bool = False  # of the reading order
    place: int = 0  # in the reading order, from 1; `taken` also counts what is left out after the last batch


@dataclass(frozen=True, kw_only=True)
class Lot:
    """Consecutive batches that are read, uploaded and changed together: that costs little more than one of them."""

    batches: tuple[HostBatch, ...]
    x: np.ndarray | torch.Tensor  # values; with `preprocess`, records as they are stored
    y: np.ndarray
    places: np.ndarray | None  # where the pixels come from; see Augment.places
    preprocess: Preprocess | None = None  # arithmetic still to be done to x
    release: Callable[[], None] | None = None  # gives the memory of x, which is pinned, back to the reader


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What chance decides for one epoch. The default is every record in the reader's order, unchanged."""

    order: np.ndarray | None = None  # int64 [records], positions in the input
    places: Places | None = None  # how pixels are moved
    crops: RandomCrops | None = None  # which parts of pictures are read


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What the model can take. Raises DataError, which names the record and the spec's `field`."""

    classes: int | None = None  # every label must be below; None: any label will do
    limits: Limits = Limits()  # noqa: RUF009 - frozen  # of whole numbers in x
    field: str = TRAINED_ON

    def labels(self, batch: Batch, reader: Reader, rows: slice = slice(None)) -> None:
        """Check that the model has a class for each label in these rows."""
        labels = None if batch.labels is None else batch.labels[rows]
        if self.classes is None or labels is None or not len(labels) or int(labels.max()) < self.classes:
            return
        row = int(labels.argmax())
        record = _name(batch, reader, (rows.start or 0) + row)
        raise DataError(
            f"{self.field}: found the label {labels[row]} of {record}; expected 0 to {self.classes - 1}, "
            f"as the model has {self.classes} classes"
        )

    def numbers(self, batch: Batch, reader: Reader) -> None:
        """Check that the model's tables have a row for each whole number."""
        for row, why in self.limits.wrong(batch.x).items():
            field = "input.source" if self.field == TRAINED_ON else self.field
            raise DataError(f"{field}: {_name(batch, reader, row)} {why}")


ANYTHING, UNCHANGED = Checks(), Draws()


def read(
    reader: Reader,
    intake: Intake,
    *,
    batch_size: int,
    together: int = 1,
    draws: Draws = UNCHANGED,
    skip: int = 0,
    at_least: int = 1,
    checks: Checks = ANYTHING,
) -> Generator[Lot]:
    """Batches from the `skip`-th on, in lots of up to `together`.

    Batches with fewer than `at_least` good records are left out. Raises DataError as `checks` does, after the batches
    before the wrong record.
    """
    order = draws.order
    total = reader.total if order is None else len(order)
    cutting = _Cutting(reader, draws, batch_size, at_least, checks, skip)
    source = intake.batches(reader, skip * batch_size, batch_size=batch_size * together, order=order, crops=draws.crops)
    if skip * batch_size >= total and order is not None:
        return  # other ranks have records of later batches, or none is left
    held: Lot | None = None  # back, as the last lot also counts what is left out after it
    with closing(source):
        for arrived in source:
            lot = cutting.cut(arrived)
            if lot is not None:
                if held is not None:
                    yield held
                held = lot
            if cutting.wrong is not None:
                if held is not None:
                    yield held
                raise cutting.wrong
    if held is not None:
        last = held.batches[-1]
        last = replace(last, taken=cutting.taken, records=total, bad=(*last.bad, *cutting.bad), last=True)
        yield replace(held, batches=(*held.batches[:-1], last))


@dataclass
class _Cutting:
    """Cuts what was read as one into batches, and counts what no batch holds."""

    reader: Reader
    draws: Draws
    batch_size: int
    at_least: int
    checks: Checks
    taken: int  # batches of the reading order so far
    bad: list[BadRecord] = field(default_factory=list)  # since the last batch that is used
    wrong: DataError | None = None  # what `checks` found in labels; it comes after the batches before it

    def cut(self, arrived: Taken) -> Lot | None:
        """The batches that are used, up to the first wrong record; None if there are none. Raises DataError."""
        batch, used = arrived.batch, list[HostBatch]()
        self.checks.numbers(batch, self.reader)
        for rows, records, missing in self._bounds(batch):
            self.taken += 1
            self.bad += missing
            if rows.stop - rows.start < self.at_least or batch.labels is None:
                continue
            try:
                self.checks.labels(batch, self.reader, rows)
            except DataError as e:
                self.wrong = e
                break
            used.append(HostBatch(rows=rows, taken=self.taken, records=records, bad=tuple(self.bad), place=self.taken))
            self.bad = []
        if not used or batch.labels is None:
            batch.release()
            return None
        return Lot(
            batches=tuple(used),
            x=arrived.x,
            y=batch.labels,
            places=None if self.draws.places is None else self.draws.places(batch.indexes),
            preprocess=arrived.preprocess,
            release=None if batch.buffer is None else batch.release,
        )

    def _bounds(self, found: Batch) -> Iterator[tuple[slice, int, list[BadRecord]]]:
        """For each batch: its rows, the records of the reading order up to and with it, and its bad records."""
        bad, order = {b.index: b for b in found.bad}, self.draws.order
        row = 0
        for first in range(found.start, found.stop, self.batch_size):
            stop = min(first + self.batch_size, found.stop)
            missing: list[BadRecord] = []
            if bad:
                indexes = range(first, stop) if order is None else order[first:stop].tolist()
                missing = [bad[index] for index in indexes if index in bad]
            rows = slice(row, row + stop - first - len(missing))
            yield rows, stop, missing
            row = rows.stop


def _name(batch: Batch, reader: Reader, row: int) -> str:
    """A record's id and its place."""
    return f"record {batch.ids[row]} ({reader.place(int(batch.indexes[row]))})"
