"""Windows of whole shards, and the batches that a window's texts make once they are sorted by length.

Only the last batch of a bucket in a window can be short. A window is always planned whole, also if some of its shards
are finished. So a resumed job makes the batches that an undisturbed one makes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from nimble_jobs.workloads.cuts import Span
from nimble_jobs.workloads.heads import KNOWN

RECORDS = 16_384  # in a window, at least: with so many, short batches of texts of usual lengths cost a few percent
FEW_RECORDS = 4096  # at least, where short batches cost nothing
_OWN_OUTPUTS = 1024  # in a window of outputs of unknown size


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """One batch of a window."""

    bucket: int
    rows: np.ndarray  # int64, positions in the window


def spans(shards: Sequence[tuple[int, int]], done: Collection[int], records: int) -> list[Span]:
    """The windows of about so many records that hold a shard that is not finished."""
    found: list[Span] = []
    first = 0
    while first < len(shards):
        last = first
        while last + 1 < len(shards) and shards[last + 1][1] - shards[first][0] <= records:
            last += 1
        if any(shard not in done for shard in range(first, last + 1)):
            found.append(Span(first=first, last=last, start=shards[first][0], stop=shards[last][1]))
        first = last + 1
    return found


def records_of(fields: Collection[str], *, pads: bool, mean: float) -> int:
    """Records in a window of texts of `mean` tokens. `pads`: whether a short batch takes as long as a full one.

    Of texts below 128 tokens, a window has up to four times as many, since a batch has more of them, too.
    """
    known = KNOWN - {"token_labels", "token_probabilities", "tokens", "offsets"}
    if not known.issuperset(fields):
        return _OWN_OUTPUTS
    least = RECORDS if pads else FEW_RECORDS
    return min(4 * least, max(least, round(128 * least / mean)))


def plan(
    lengths: np.ndarray, buckets: Sequence[int], rows: Sequence[int], *, pads: bool, descending: bool = False
) -> list[Planned]:
    """Batches of the records with these lengths, each bucket's together; records of length 0 are in none.

    `buckets` and `rows` give each bucket's length and records in a batch. If short batches are padded, the last records
    of a bucket join the next longer one where that takes fewer tokens than a batch of their own. Neighbouring windows
    that alternate `descending` share a bucket at their border.
    """
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    of = np.searchsorted(np.asarray(buckets), lengths[order])
    own = [order[of == bucket] for bucket in range(len(buckets))]
    batches: list[Planned] = []
    carried = order[:0]
    for bucket, (size, length) in enumerate(zip(rows, buckets, strict=True)):
        held = np.concatenate([carried, own[bucket]])
        rest = len(held) % size
        carried = held[:0]
        after = next((b for b in range(bucket + 1, len(buckets)) if len(own[b])), None)
        if pads and rest and after is not None and rest * buckets[after] < size * length:
            held, carried = held[: len(held) - rest], held[len(held) - rest :]
        batches += [Planned(bucket=bucket, rows=held[a : a + size]) for a in range(0, len(held), size)]
    return batches[::-1] if descending else batches
