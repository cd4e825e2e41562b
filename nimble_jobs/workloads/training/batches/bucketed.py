"""The batches of a training on texts: each holds texts of one bucket, so that one schedule serves it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nimble_jobs.engine.device import able
from nimble_jobs.errors import DataError
from nimble_jobs.packing import Layout
from nimble_jobs.pipeline import Meter, ahead
from nimble_jobs.spec import JobSpec, TrainSpec
from nimble_jobs.workloads.stages import summary_of
from nimble_jobs.workloads.training.batches.feed import DeviceBatch
from nimble_jobs.workloads.training.batches.lots import HostBatch
from nimble_jobs.workloads.training.batches.tokens import TokenSet

_AHEAD = 8  # batches that wait for their step


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Texts of up to `tokens` tokens, in batches of `rows`."""

    tokens: int
    rows: int
    layout: Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The records of one batch."""

    bucket: int  # its place among the buckets
    records: np.ndarray  # int64 [n], their places in a TokenSet


def groups_of(
    order: np.ndarray, lengths: np.ndarray, buckets: Sequence[Bucket], *, last_batch: Literal["keep", "drop"]
) -> list[Group]:
    """Batches of records in `order`, each from one bucket. A batch comes as soon as its last record does.

    Records at the end that fill no batch of their bucket go to the next longer one. What is left in the longest bucket
    is a short batch, or with `last_batch` drop none. So the number of batches does not depend on the order.
    """
    ends = np.array([bucket.tokens for bucket in buckets])
    places = np.searchsorted(ends, lengths[order])
    waiting: list[list[int]] = [[] for _ in buckets]
    found: list[Group] = []
    for record, place in zip(order.tolist(), places.tolist(), strict=True):
        waiting[place].append(record)
        if len(waiting[place]) == buckets[place].rows:
            found.append(Group(bucket=place, records=np.array(waiting[place])))
            waiting[place] = []
    left: list[int] = []
    for place, (bucket, mine) in enumerate(zip(buckets, waiting, strict=True)):
        left += mine
        while len(left) >= bucket.rows:
            found.append(Group(bucket=place, records=np.array(left[: bucket.rows])))
            left = left[bucket.rows :]
    if left and last_batch == "keep":
        found.append(Group(bucket=len(buckets) - 1, records=np.array(left)))
    return found


@dataclass(frozen=True, kw_only=True)
class TextSampler:
    """How much one epoch reads."""

    total: int  # records of the input, good or bad
    records: int  # in the batches of one epoch
    batches: int


@dataclass(frozen=True, kw_only=True)
class TextEpochs:
    """What each epoch of a training on texts reads, and whether a validation follows it."""

    train: TrainSpec
    seed: int
    tokens: TokenSet
    held_out: TokenSet | None
    buckets: tuple[Bucket, ...]
    sampler: TextSampler

    @classmethod
    def of(cls, spec: JobSpec, tokens: TokenSet, held_out: TokenSet | None, buckets: tuple[Bucket, ...]) -> TextEpochs:
        """Raises DataError if no batch is left."""
        train = spec.train
        assert train is not None
        groups = groups_of(np.arange(len(tokens)), tokens.lengths, buckets, last_batch=train.last_batch)
        if not groups:
            raise DataError(
                f"train.last_batch: drop leaves no batch, because none of {len(tokens)} records fill one; "
                "expected keep, or a smaller input.text.tokens_per_batch"
            )
        records = sum(len(group.records) for group in groups)
        sampler = TextSampler(total=tokens.total, records=records, batches=len(groups))
        return cls(
            train=train, seed=spec.model.seed, tokens=tokens, held_out=held_out, buckets=buckets, sampler=sampler
        )

    def validated(self, epoch: int) -> bool:
        """Whether a validation follows this epoch."""
        return self.train.validation is not None and epoch % self.train.validation.every_epochs == 0

    def groups(self, epoch: int) -> list[Group]:
        """The batches of an epoch; the same for equal seed, epoch and records. The first epoch is 1."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.tokens))
        return groups_of(order, self.tokens.lengths, self.buckets, last_batch=self.train.last_batch)


class TextBatches:
    """All batches of a training on texts, on its device: the rest of an epoch, its validation, the next epoch, ..."""

    def __init__(self, epochs: TextEpochs, device: torch.device, *, epoch: int = 1, batch: int = 0) -> None:
        """They begin with the batch that follows `batch` others of an epoch."""
        self._epochs, self._device = epochs, device
        self._pins = able(device).asynchronous
        self._pack = Meter("pack")
        self._step = Meter("step")
        self._pack.limit = _AHEAD
        self._prepared = ahead(self._made(epoch, batch), _AHEAD, name="nimble-texts")

    @property
    def meters(self) -> TextBatches:
        """What says how busy the stages are."""
        return self

    def summary(self) -> dict[str, object]:
        """What `summary_of` says of the stages."""
        return summary_of([self._pack, self._step])

    def segment(self) -> Iterator[DeviceBatch]:
        """The batches of the next segment. Take all of them, or call `close`."""
        for item in self._prepared:
            if item is None:
                return
            host, x, y = item
            on_device = [t.to(self._device, non_blocking=True) for t in (x, y)]
            with self._step.busy():
                yield DeviceBatch(host=host, x=on_device[0], y=on_device[1])

    def close(self) -> None:
        """End the thread."""
        self._prepared.close()

    def _made(self, epoch: int, batch: int) -> Generator[tuple[HostBatch, torch.Tensor, torch.Tensor] | None]:
        epochs = self._epochs
        for number in range(epoch, epochs.train.epochs + 1):
            skip = batch if number == epoch else 0
            yield from self._segment(epochs.tokens, epochs.groups(number), skip)
            yield None
            if epochs.held_out is not None and epochs.validated(number):
                order = np.arange(len(epochs.held_out))
                groups = groups_of(order, epochs.held_out.lengths, epochs.buckets, last_batch="keep")
                yield from self._segment(epochs.held_out, groups, 0)
                yield None

    def _segment(
        self, tokens: TokenSet, groups: Sequence[Group], skip: int
    ) -> Generator[tuple[HostBatch, torch.Tensor, torch.Tensor]]:
        records = sum(len(group.records) for group in groups[:skip])
        for number, group in enumerate(groups[skip:], start=skip):
            with self._pack.busy():
                bucket = self._epochs.buckets[group.bucket]
                x = torch.from_numpy(tokens.rows(group.records, bucket.layout, bucket.tokens))
                y = torch.from_numpy(tokens.labels[group.records])
                if self._pins:
                    x, y = x.pin_memory(), y.pin_memory()
            records += len(group.records)
            yield (
                HostBatch(
                    rows=slice(0, len(group.records)),
                    taken=number + 1,
                    records=records,
                    bad=tokens.bad if number == 0 else (),
                    last=number == len(groups) - 1,
                ),
                x,
                y,
            )
