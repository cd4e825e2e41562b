"""Tokens of words, kept from text to text.

A tokenizer of BERT's kind makes the same tokens of a word wherever the word stands, and a space always ends a word. A
few words make up most of what is written. So each different word is given to the library once, and a text's tokens are
put together from those of its words. That takes about a tenth of the time. What is done for each occurrence of a word
happens in pyarrow, which releases the interpreter's lock, and in numpy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nimble_jobs.data import arrow
from nimble_jobs.data.text.encoding import encoded

_MOST_WORDS = 1 << 18  # kept; then they are collected anew
_MOST_CHARACTERS = 1 << 24  # of kept words
_TRIAL = 1024  # new words before they are compared with those that were known
_NEW = 1 / 3  # above this share of new words, the library is faster with whole texts
_SAMPLE = "a"
BY_WORD = frozenset({"WordPiece", "WordLevel"})  # models that see one word at a time


class _Known:
    """Words by number, with their tokens. Numbers are valid for a table that is read after them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.characters = 0
        self._ids, self._ends = np.empty(0, np.int32), np.zeros(1, np.int32)  # with room for more
        self._used = 0  # of the ids
        self.table = self._as_lists(0)  # lists of ids, by number

    def add(self, words: Sequence[str], made: Sequence[Sequence[int]]) -> int:
        """Add words with their tokens; how many were new. One thread at a time may call it."""
        fresh = [(word, ids) for word, ids in zip(words, made, strict=True) if word not in self.numbers]
        first = len(self.numbers)
        sizes = np.fromiter((len(ids) for _, ids in fresh), np.int32, len(fresh))
        used = self._used + int(sizes.sum())
        self._ids, self._ends = _grown(self._ids, used), _grown(self._ends, first + len(fresh) + 1)
        self._ids[self._used : used] = np.fromiter(chain.from_iterable(ids for _, ids in fresh), np.int32)
        self._ends[first + 1 : first + len(fresh) + 1] = self._used + np.cumsum(sizes)
        self._used = used
        self.table = self._as_lists(first + len(fresh))
        self.numbers.update(zip((word for word, _ in fresh), range(first, first + len(fresh)), strict=True))
        self.characters += sum(len(word) for word, _ in fresh)
        return len(fresh)

    def _as_lists(self, count: int) -> pa.ListArray:
        ids = arrow.numbers(self._ids[: self._used])
        return pa.ListArray.from_arrays(arrow.numbers(self._ends[: count + 1]), ids)


class Words:
    """Tokenizes texts word by word. Threads may share it."""

    def __init__(self, tokenizer: Any, begin: Sequence[int], end: Sequence[int]) -> None:
        """`begin` and `end` are the special tokens around each text."""
        self._tokenizer = tokenizer
        self._begin, self._end = np.array(begin, dtype=np.int32), np.array(end, dtype=np.int32)
        self._lock = threading.Lock()
        self._known = _Known()
        self._seen = self._new = 0  # words
        self.pays = True  # whether most words were known

    @classmethod
    def of(cls, tokenizer: Any) -> Words | None:
        """For a `tokenizers.Tokenizer` without truncation and padding; None unless its words are independent."""
        splits, model = type(tokenizer.pre_tokenizer).__name__, type(tokenizer.model).__name__
        if splits != "BertPreTokenizer" or model not in BY_WORD or not _by_character(tokenizer.normalizer):
            return None
        added = tokenizer.get_added_tokens_decoder().values()
        if any(character.isspace() for token in added for character in token.content):
            return None
        try:
            bare, whole = tokenizer.encode(_SAMPLE, add_special_tokens=False), tokenizer.encode(_SAMPLE)
        except Exception:  # noqa: BLE001  # the library's, for a vocabulary with neither the sample nor an unknown word
            return None
        mask = whole.special_tokens_mask
        begin = mask.index(0) if 0 in mask else 0
        stop = begin + len(bare.ids)
        if not bare.ids or whole.ids[begin:stop] != bare.ids or not all(mask[:begin] + mask[stop:]):
            return None
        return cls(tokenizer, whole.ids[:begin], whole.ids[stop:])

    def count(self, text: str) -> int:
        """How many tokens a text has, without special ones."""
        return len(self._of_words([text])[0])

    def __call__(
        self, texts: Sequence[str], limit: int, truncate: Literal["end", "start", "error"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ids of all texts, int32 [tokens]; how many each text has, special ones included, int32 [texts]; and which
        lost tokens, bool [texts].

        A text has at most `limit` tokens; a longer one loses tokens at its end or start, or none for "error".
        """
        ids, ends = self._of_words(texts)
        starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        room = limit - len(self._begin) - len(self._end)
        cut = (ends - starts > room) & (truncate != "error")
        if truncate == "start":
            starts = np.where(cut, ends - room, starts)
        else:
            ends = np.where(cut, starts + room, ends)
        parts = [
            part
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
            for part in (self._begin, ids[start:end], self._end)
        ]
        lengths = (ends - starts + len(self._begin) + len(self._end)).astype(np.int32)
        return np.concatenate([ids[:0], *parts]), lengths, cut

    def _of_words(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, int32, without special tokens; and for each text the position behind its last one."""
        split = pc.split_pattern(arrow.texts(texts), pattern=" ")
        if isinstance(split, pa.ChunkedArray):
            split = split.combine_chunks()
        coded = split.flatten().dictionary_encode()
        words = coded.dictionary.to_pylist()
        known = self._known
        numbers = self._numbers(known, words)
        if (unknown := np.flatnonzero(numbers < 0)).size:
            new = [words[number] for number in unknown.tolist()]
            self._learn(known, new)
            numbers[unknown] = self._numbers(known, new)
        with self._lock:
            self._seen += len(coded)
            self.pays = self._new <= _TRIAL + self._seen * _NEW
        found = known.table.take(arrow.numbers(numbers[arrow.values(coded.indices)]))
        last = arrow.values(split.offsets)[1:]  # the word behind each text
        return arrow.values(found.values), arrow.values(found.offsets)[last].astype(np.int64)

    @staticmethod
    def _numbers(known: _Known, words: Sequence[str]) -> np.ndarray:
        """int64 [words]; -1 for an unknown one."""
        return np.fromiter(map(known.numbers.get, words, repeat(-1)), np.int64, len(words))

    def _learn(self, known: _Known, words: Sequence[str]) -> None:
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        found = [one.ids for one in encoded(encode, words)]
        with self._lock:
            self._new += known.add(words, found)
            if known is self._known and (
                len(known.numbers) >= _MOST_WORDS or known.characters >= _MOST_CHARACTERS
            ):  # those that are at work keep the old ones
                self._known = _Known()


def _by_character(normalizer: Any) -> bool:
    """Whether what a normalizer makes of the text between two spaces depends on that text alone, and keeps spaces.

    BERT's removes accents too, but composes nothing across a space.
    """
    if type(normalizer).__name__ == "Sequence":
        return all(_by_character(normalizer[i]) for i in range(len(normalizer)))
    return normalizer is None or type(normalizer).__name__ in ("BertNormalizer", "Lowercase")


def _grown(table: np.ndarray, size: int) -> np.ndarray:
    """The table, or a larger copy, with room for so many values."""
    if size <= len(table):
        return table
    larger = np.empty(max(size, 2 * len(table), 4096), dtype=table.dtype)
    larger[: len(table)] = table
    return larger
