"""Batches that several ranks take together: each has its share, and all know of all shares before they run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from nimble_jobs.data import BadRecord
from nimble_jobs.workloads.training.batches.feed import DeviceBatch
from nimble_jobs.workloads.training.batches.lots import HostBatch
from nimble_jobs.workloads.training.ranks.gang import Gang

_OVER = sys.maxsize  # no batch comes after it


@dataclass(frozen=True)
class Share:
    """Which records of each batch are a rank's own: equally many for each rank, in the order of the ranks."""

    rank: int = 0
    count: int = 1

    def size(self, batch_size: int) -> int:
        """Records of a whole batch that are this rank's."""
        return batch_size // self.count

    def of(self, order: np.ndarray, batch_size: int, *, at_least: int) -> np.ndarray:
        """This rank's records, int64 [n], of a reading order. `batch_size` is a multiple of `count`.

        The last batch may be short: its shares differ by one record at most, and none has fewer than `at_least` if
        there are as many. Some ranks then have no records of it.
        """
        whole = len(order) - len(order) % batch_size
        mine = order[:whole].reshape(-1, self.count, self.size(batch_size))[:, self.rank].reshape(-1)
        rest = order[whole:]
        parts = min(self.count, max(1, len(rest) // at_least))
        if self.rank < parts:
            mine = np.concatenate([mine, np.array_split(rest, parts)[self.rank]])
        return mine


@dataclass(frozen=True, kw_only=True, eq=False)
class Joint:
    """One batch of all ranks."""

    own: DeviceBatch | None  # this rank's share; None if it has no good record of the batch
    host: HostBatch  # of the whole batch; its rows say nothing
    size: int  # good records of all ranks

    @property
    def share(self) -> float:
        """This rank's share of the good records."""
        return 0.0 if self.own is None else len(self.own.y) / self.size


def together(batches: Iterable[DeviceBatch], gang: Gang | None, *, batch_size: int, total: int) -> Iterator[Joint]:
    """The batches of a segment, in the order of their places in its reading order. Raises RankLost.

    A batch of which no rank has a good record is left out. `total` counts the records of the reading order.
    """
    if gang is None:
        for batch in batches:
            yield Joint(own=batch, host=batch.host, size=len(batch.y))
        return
    waiting = iter(batches)
    mine = next(waiting, None)
    while True:
        host = None if mine is None else mine.host
        told = (_OVER, 0, 1, 0)
        if host is not None and mine is not None:
            told = (host.place, len(mine.y), int(host.last), len(host.bad))
        all_told = gang.numbers(told)
        at = min(place for place, *_ in all_told)
        if at == _OVER:
            return
        here = [(size, last, bad) for place, size, last, bad in all_told if place == at]
        own = mine if host is not None and host.place == at else None
        bad: list[BadRecord] = []
        if any(n for _, _, n in here):
            bad = _gathered(own, gang)
        over = all(last for _, last, _ in here) and not any(at < place < _OVER for place, *_ in all_told)
        taken = -(-total // batch_size) if over else at
        records = min(taken * batch_size, total)
        yield Joint(
            own=own,
            host=HostBatch(rows=slice(0), taken=taken, records=records, bad=tuple(bad), last=over, place=at),
            size=sum(size for size, _, _ in here),
        )
        if own is not None:
            mine = next(waiting, None)


def _gathered(own: DeviceBatch | None, gang: Gang) -> list[BadRecord]:
    mine = [] if own is None else [[bad.index, bad.id, bad.reason] for bad in own.host.bad]
    found = [BadRecord(index=i, id=name, reason=why) for all_of in gang.gather(mine) for i, name, why in all_of]
    return sorted(found, key=lambda record: record.index)
