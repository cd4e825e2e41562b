"""Chooses the buckets of a job: from the spec, or from the lengths of a sample of its texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nimble_jobs.buckets import PRICE, candidates, choose, rows_of
from nimble_jobs.data import Reader
from nimble_jobs.data.text.reading import spread
from nimble_jobs.workloads.text.feed import Bucket
from nimble_jobs.workloads.text.setup import TextSetup

SAMPLE = 2048  # texts
_CALL_TOKENS = 512  # a call of the model takes as long as so many tokens more
_SHORT = 1 / 16  # of a batch: what a bucket's last records in a window cost, which mostly join the next bucket
_PLACES = 16  # of the input, from which the sample is taken


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """Lengths of a sample of the texts."""

    lengths: dict[int, int]  # tokens -> texts
    whole: bool  # whether these are all texts

    @property
    def mean(self) -> float:
        """Tokens of a text; 1 if there are none."""
        texts = sum(self.lengths.values())
        return sum(length * count for length, count in self.lengths.items()) / texts if texts else 1.0


def survey(reader: Reader, setup: TextSetup) -> Survey:
    """Tokenize a sample. It depends on the input alone, not on chance. Raises DataError."""
    counts: Counter[int] = Counter()
    for texts in reader.texts(spread(reader.total, SAMPLE, _PLACES)):
        given = [None if texts.start + i in texts.bad else text for i, text in enumerate(texts.values)]
        for first in range(0, len(given), 256):
            counts.update(setup.tokenizer(given[first : first + 256]).lengths.tolist())
    counts.pop(0, None)  # bad records
    return Survey(lengths=dict(counts), whole=reader.total <= SAMPLE)


def lengths_of(
    found: Survey, setup: TextSetup, *, stored: Callable[[int], bool], window: int, pads: bool
) -> tuple[int, ...]:
    """The lengths of the buckets. `stored` says whether the schedule of a length is stored. A bucket has at most one
    short batch in a `window`, of so many records, which costs a whole one if it is padded (`pads`).

    The last one holds every text that the job may meet.
    """
    asked = setup.spec.buckets
    if asked != "auto":
        kept = tuple(length for length in asked if length <= setup.limit)
        return kept if kept and kept[-1] == setup.limit else (*kept, setup.limit)
    known = [length for length in candidates(range(1, setup.limit + 1), setup.limit) if stored(length)]
    tokens = setup.batch_tokens(pads=pads)
    return chosen(found, limit=setup.limit, stored=known, window=window, tokens=tokens, pads=pads)


def chosen(
    found: Survey, *, limit: int, stored: Collection[int], window: int, tokens: int, pads: bool
) -> tuple[int, ...]:
    """The lengths for what a survey found, texts of up to `limit` tokens. `stored` are those of stored schedules, and
    a batch has `tokens`; `window` and `pads` are as for `lengths_of`.
    """
    lengths = found.lengths or {min(8, limit): 1}
    short = tokens * _SHORT if pads else _CALL_TOKENS
    ends = choose(lengths, limit=limit, price=PRICE + short / (window * found.mean), stored=stored)
    return ends if found.whole or ends[-1] == limit else (*ends, limit)


def buckets_of(lengths: tuple[int, ...], setup: TextSetup, *, pads: bool) -> tuple[Bucket, ...]:
    """The buckets of these lengths."""
    tokens = setup.batch_tokens(pads=pads)
    return tuple(Bucket(length=length, rows=rows_of(length, tokens), layout=setup.layout(length)) for length in lengths)
