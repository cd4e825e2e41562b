"""Where a job cuts its records: into shards, and these into batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Where a batch begins and ends, and which shard it belongs to."""

    shard: int
    start: int
    stop: int
    last: bool  # of its shard
    left: int  # records that are to be scored from `start` on
    since: int | None = None  # the first shard of its window, which ends with `shard`; None: the shard is alone

    @property
    def shards(self) -> range:
        """The shards that are complete after the last batch."""
        return range(self.shard if self.since is None else self.since, self.shard + 1)


def shards_of(total: int, size: int) -> list[tuple[int, int]]:
    """The first position of each shard, and the one behind its last."""
    return list(pairwise([*range(0, total, size), total]))


def cut(shards: list[tuple[int, int]], done: frozenset[int], size: int) -> list[Bounds]:
    """The batches that are to be scored."""
    batches = [
        (shard, a, min(a + size, stop), a + size >= stop)
        for shard, (first, stop) in enumerate(shards)
        if shard not in done
        for a in range(first, stop, size)
    ]
    left = sum(stop - start for _, start, stop, _ in batches)
    bounds = list[Bounds]()
    for shard, start, stop, last in batches:
        bounds.append(Bounds(shard=shard, start=start, stop=stop, last=last, left=left))
        left -= stop - start
    return bounds
