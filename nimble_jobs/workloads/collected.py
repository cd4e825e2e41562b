"""The shards that are being collected: columns and bad records, put back into the order of the input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nimble_jobs.data import BadRecord, Batch
from nimble_jobs.data.ragged import Ragged
from nimble_jobs.data.records import NO_COUNTS, NotFinite, ShardCounts
from nimble_jobs.data.writers import Column, Form
from nimble_jobs.data.writers import Columns as Values
from nimble_jobs.workloads.columns import Columns


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A shard that can be written."""

    index: int
    columns: Values
    bad: Sequence[BadRecord]
    carries: str | None = None
    counts: ShardCounts = NO_COUNTS


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which columns are collected."""

    fields: tuple[str, ...]
    classes: tuple[str, ...] = ()  # names of the model's classes, if any are wanted
    per_token: frozenset[str] = frozenset()  # outputs with a value for each token


class Collected:
    """Collects the batches of one or several shards that follow each other."""

    def __init__(self, wanted: Wanted, forms: dict[str, tuple[Form, str]]) -> None:
        """`forms` of the values of each field, and whose they are; those that are new are added."""
        self._columns = Columns(wanted.fields, wanted.classes, wanted.per_token, forms)
        self._indexes: list[np.ndarray] = []
        self._shortened: list[np.ndarray] = []
        self._bad: list[BadRecord] = []
        self._not_finite: dict[str, list[tuple[int, str]]] = {}  # positions and ids of records, by field

    def add(self, outputs: Mapping[str, torch.Tensor], batch: Batch, batch_size: int) -> None:
        """Add the first len(batch) rows of the outputs, and the bad records. A full batch has `batch_size` rows; those
        of texts in eager may have other numbers. Raises ModelError, DataError.
        """
        self._bad.extend(batch.bad)
        if len(batch):
            full = batch_size if batch.tokens is None else None
            not_finite = self._columns.add(outputs, batch.ids, batch.labels, batch.tokens, full)
            for name, rows in not_finite.items():
                those = ((int(batch.indexes[row]), batch.ids[row]) for row in rows.tolist())
                self._not_finite.setdefault(name, []).extend(those)
            self._indexes.append(batch.indexes)
            if batch.tokens is not None:
                self._shortened.append(batch.indexes[batch.tokens.shortened])

    def cut(
        self,
        shards: Sequence[tuple[int, int]],
        among: Sequence[int],
        done: Collection[int],
        *,
        carries: str | None = None,
    ) -> Iterator[Shard]:
        """The shards `among` these that are not `done`, in order. `shards` says where each begins and ends."""
        columns = self._columns.finish()
        indexes = np.concatenate(self._indexes) if self._indexes else np.empty(0, dtype=np.int64)
        order: np.ndarray | None = None
        if not bool((np.diff(indexes) > 0).all()):
            order = np.argsort(indexes, kind="stable")
            indexes = indexes[order]
        shortened = np.concatenate([np.empty(0, dtype=np.int64), *self._shortened])
        for shard in among:
            first, stop = shards[shard]
            a, b = np.searchsorted(indexes, (first, stop)).tolist()
            if shard not in done:
                yield Shard(
                    index=shard,
                    columns={name: _part(values, order, a, b) for name, values in columns.items()} if b > a else {},
                    bad=sorted((r for r in self._bad if first <= r.index < stop), key=lambda record: record.index),
                    carries=carries,
                    counts=ShardCounts(
                        shortened=int(((first <= shortened) & (shortened < stop)).sum()),
                        not_finite=self._not_finite_in(first, stop),
                    ),
                )

    def _not_finite_in(self, first: int, stop: int) -> dict[str, NotFinite]:
        """Records [first, stop) whose output has NaN or infinity, by field."""
        found = {}
        for name, records in self._not_finite.items():
            if mine := [record for record in records if first <= record[0] < stop]:
                found[name] = NotFinite(records=len(mine), first=min(mine)[1])
        return found


def _part(values: Column, order: np.ndarray | None, start: int, stop: int) -> Column:
    """Values [start, stop), in this order if there is one. So only a shard's values are copied at a time."""
    if order is None:
        return values[start:stop]
    order = order[start:stop]
    if isinstance(values, Ragged):
        return values.take(order)
    return values[order] if isinstance(values, np.ndarray) else [values[i] for i in order.tolist()]
