"""The texts of a training as tokens, in memory: four bytes a token, so that every epoch can take them in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nimble_jobs.buckets import Histogram
from nimble_jobs.data import BadRecord, Reader
from nimble_jobs.data.text.reading import Texts
from nimble_jobs.data.text.tokenizer import Tokenizer, Tokens
from nimble_jobs.errors import DataError
from nimble_jobs.packing import Layout
from nimble_jobs.pipeline import usable_cores

_TOGETHER = 1024  # texts that are tokenised at once


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """The tokens of all good records of an input, one record after another."""

    positions: np.ndarray  # int64 [records], in the input
    starts: np.ndarray  # int64 [records + 1], of each record's tokens
    ids: np.ndarray  # int32 [tokens]
    types: np.ndarray | None  # uint8 [tokens]
    labels: np.ndarray  # int64 [records]
    bad: tuple[BadRecord, ...]
    cut: int  # records that lost tokens
    total: int  # records of the input, good or bad
    padding: int  # the token id behind a text

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each record, int64 [records]."""
        return np.diff(self.starts)

    @property
    def histogram(self) -> Histogram:
        """How many records have how many tokens."""
        lengths, counts = np.unique(self.lengths, return_counts=True)
        return dict(zip(lengths.tolist(), counts.tolist(), strict=True))

    def rows(self, records: np.ndarray, layout: Layout, bucket: int) -> np.ndarray:
        """Rows uint8 [n, layout.nbytes] of some records, padded to `bucket` tokens."""
        rows = layout.empty(len(records))
        fields = layout.fields(rows)
        fields["input_ids"] = self.padding
        lengths = self.lengths[records]
        inside = np.arange(bucket) < lengths[:, None]
        at = (self.starts[records][:, None] + np.arange(bucket))[inside]
        fields["input_ids"][inside] = self.ids[at]
        fields["attention_mask"] = lengths
        if self.types is not None:
            fields["token_type_ids"][inside] = self.types[at]
        return rows


def token_set(reader: Reader, tokenizer: Tokenizer, *, padding: int, field: str) -> TokenSet:
    """Read and tokenise all texts. Raises DataError, naming `field`, if no record is good, or as the reader does."""
    found: list[Tokens] = []
    bad: dict[int, str] = {}
    for texts, tokens in _tokenised(reader, tokenizer):
        bad |= texts.bad | {texts.start + row: why for row, why in tokens.bad.items()}
        found.append(tokens)
    good = np.ones(reader.total, dtype=bool)
    good[list(bad)] = False
    positions = np.flatnonzero(good)
    records = tuple(reader.bad_record(index, bad[index]) for index in sorted(bad))
    labels = reader.labels(positions)
    if not len(positions) or labels is None:
        why = f", the first is {records[0].id}: {records[0].reason}" if records else ""
        raise DataError(f"{field}: no good record to train on{why}; expected at least one")
    lengths = np.concatenate([tokens.lengths for tokens in found]).astype(np.int64)
    kept = np.repeat(good, lengths)  # a record without a label may have tokens
    types = [tokens.types for tokens in found if tokens.types is not None]
    return TokenSet(
        positions=positions,
        starts=np.concatenate([[0], np.cumsum(lengths[positions])]),
        ids=np.concatenate([tokens.ids for tokens in found])[kept],
        types=np.concatenate(types)[kept] if types else None,
        labels=labels,
        bad=records,
        cut=sum(tokens.cut for tokens in found),
        total=reader.total,
        padding=padding,
    )


def _tokenised(reader: Reader, tokenizer: Tokenizer) -> Iterator[tuple[Texts, Tokens]]:
    """All texts in order, tokenised by threads: the library releases the interpreter's lock."""
    ranges = [(start, min(start + _TOGETHER, reader.total)) for start in range(0, reader.total, _TOGETHER)]
    workers = usable_cores()
    waiting: deque[tuple[Texts, Future[Tokens]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="nimble-tokens") as pool:
        for texts in reader.texts(ranges):
            values = [None if texts.start + row in texts.bad else text for row, text in enumerate(texts.values)]
            waiting.append((texts, pool.submit(tokenizer, values)))
            if len(waiting) > 2 * workers:
                before, future = waiting.popleft()
                yield before, future.result()
        while waiting:
            before, future = waiting.popleft()
            yield before, future.result()
