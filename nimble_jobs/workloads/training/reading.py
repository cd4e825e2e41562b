"""Records of a training in its order: read, checked, and cut into the batches of steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from nimble_jobs.chance import RandomCrops
from nimble_jobs.data import BadRecord, Batch, Reader
from nimble_jobs.errors import DataError
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.workloads.training.intake import Intake, Taken

TRAINED_ON = "input.fields.label"
HELD_OUT = "train.validation.source"

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
    x: np.ndarray | torch.Tensor  # values; with `preprocess`, records as they are stored
    y: np.ndarray
    places: np.ndarray | None  # where the pixels are to come from; see Augment.places
    preprocess: Preprocess | None = None  # what is left to be done to x
    release: Callable[[], None] | None = None  # gives the memory of x, which is pinned, back to the reader


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
    intake: Intake | None = None,
    crops: RandomCrops | None = None,
) -> Generator[Lot]:
    """Batches from the `skip`-th on, in lots of up to `together`. Those with fewer than `at_least` good records are
    left out.

    `intake` says how records are handed over; None: as values on the host. `crops` draws random parts of pictures.
    Raises DataError, naming the spec's `field`, for a label that the model has no class for.
    """
    waiting: Lot | None = None
    total = reader.total if order is None else len(order)
    taken, bad = skip, list[BadRecord]()
    size = batch_size * together
    intake = intake or Intake(torch.device("cpu"))
    batches_read = intake.batches(reader, skip * batch_size, batch_size=size, order=order, crops=crops)
    with closing(_within(batches_read, reader, limits, field)) as source:
        for taken_in in source:
            found = taken_in.batch
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
                waiting = Lot(
                    batches=tuple(batches),
                    x=taken_in.x,
                    y=found.labels,
                    places=moved,
                    preprocess=taken_in.preprocess,
                    release=None if found.buffer is None else found.release,
                )
            else:
                found.release()
            if wrong is not None:
                if waiting is not None:
                    yield waiting
                raise wrong
    if waiting is not None:
        last = waiting.batches[-1]  # what follows the last used batch is done with it
        last = replace(last, taken=taken, records=total, bad=(*last.bad, *bad), last=True)
        yield replace(waiting, batches=(*waiting.batches[:-1], last))


def _within(batches: Generator[Taken], reader: Reader, limits: Limits, field: str) -> Generator[Taken]:
    """The batches, each checked before it is sent to the device. Raises DataError."""
    with closing(batches):
        for taken in batches:
            check_numbers(taken.batch, reader, limits, field)
            yield taken


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
