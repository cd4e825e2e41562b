"""Where a job cuts its records: into shards, and these into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nimble_jobs.data import Reader
from nimble_jobs.job import ShardClaim


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The shards of a window, and the records in them."""

    first: int  # shard
    last: int
    start: int  # record
    stop: int

    @property
    def shards(self) -> range:
        """The numbers of its shards."""
        return range(self.first, self.last + 1)


def shards_of(total: int, size: int) -> list[tuple[int, int]]:
    """The first position of each shard, and the one behind its last."""
    return list(pairwise([*range(0, total, size), total]))


def shards_for(reader: Reader, size: int) -> list[tuple[int, int]]:
    """As `shards_of`; the records of a request of a batch file are never in two shards."""
    if reader.requests is None:
        return shards_of(reader.total, size)
    starts = reader.requests.starts
    shards = list[tuple[int, int]]()
    while (first := shards[-1][1] if shards else 0) < reader.total:
        whole = int(starts[np.searchsorted(starts, first + size, side="right") - 1])
        shards.append((first, whole if whole > first else int(starts[np.searchsorted(starts, first, side="right")])))
    return shards


def cut_claims(claims: Sequence[ShardClaim], size: int, *, beyond: int) -> list[Bounds]:
    """The batches of these shards. `beyond`: records that are to be scored after them."""
    batches = [
        (claim.index, a, min(a + size, claim.stop), a + size >= claim.stop)
        for claim in claims
        for a in range(claim.start, claim.stop, size)
    ]
    return _placed(batches, beyond)


def cut(shards: list[tuple[int, int]], done: frozenset[int], size: int) -> list[Bounds]:
    """The batches that are to be scored."""
    batches = [
        (shard, a, min(a + size, stop), a + size >= stop)
        for shard, (first, stop) in enumerate(shards)
        if shard not in done
        for a in range(first, stop, size)
    ]
    return _placed(batches, 0)


def _placed(batches: list[tuple[int, int, int, bool]], beyond: int) -> list[Bounds]:
    """Batches as (shard, start, stop, last)."""
    left = beyond + sum(stop - start for _, start, stop, _ in batches)
    bounds = list[Bounds]()
    for shard, start, stop, last in batches:
        bounds.append(Bounds(shard=shard, start=start, stop=stop, last=last, left=left))
        left -= stop - start
    return bounds
