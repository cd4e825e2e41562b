"""Texts to token ids, with the library `tokenizers`, which releases the interpreter's lock.

Special tokens are added as the tokenizer's template says. A special token that is written in a text counts as that
token, as in transformers and sentence-transformers.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from nimble_jobs.data.text.encoding import encoded, places_left
from nimble_jobs.data.text.padding import stand_in
from nimble_jobs.data.text.values import HOW_TO_CUT, Text, TokenIds
from nimble_jobs.data.text.words import BY_WORD, Words
from nimble_jobs.errors import ModelError, first_line

_MARGIN = 16  # tokens beyond the limit that the part of a long text must have
_CHARACTERS = 16  # of a token, at most, in what is tried first of a long text
_GROWN = 16  # times as much; then a part is taken although where it is cut may affect its tokens
_PIECE, _PIECE_OF_WORDS = 256, 1024  # records that are best tokenized at once
_TRIED = 64  # texts that the library tokenizes, too, before words are relied on

# Each thread of ours tokenizes texts of its own, so the library needs no threads. It also warns about forks otherwise.
_SWITCH = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What a job wants of its tokens."""

    limit: int  # most tokens of a record, special ones included
    truncate: Literal["end", "start", "error"] = "end"
    prompt: str = ""
    lower_case: bool = False
    vocabulary: int | None = None  # the model takes ids below it; None: unknown
    alone: bool = False  # whether no record is a pair
    types: bool = False  # whether the model tells the two texts of a pair apart
    offsets: bool = False  # whether to tell where in the text each token lies
    padding: int | None = None  # the token id that the model takes for padding; None: it names none
    pad_token: str | None = None  # that the files beside the tokenizer name
    finds_end: bool = False  # whether the model looks for the last token that is no padding


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The tokens of some records, one after another. Bad records have none."""

    ids: np.ndarray  # int32 [tokens]
    types: np.ndarray | None  # uint8 [tokens]
    offsets: np.ndarray | None  # int32 [tokens, 2], begin and end in characters of the text as it was given
    lengths: np.ndarray  # int32 [records]
    shortened: np.ndarray  # bool [records], those that lost tokens
    bad: dict[int, str]  # reasons, by record

    @property
    def cut(self) -> int:
        """Records that lost tokens."""
        return int(self.shortened.sum())


class Tokenizer:
    """Tokenizes batches of texts. Threads may share it."""

    def __init__(self, data: bytes, rules: TokenRules, *, name: str) -> None:
        """`data` are the bytes of a tokenizer.json; `name` is for messages. Raises ModelError."""
        os.environ.setdefault(_SWITCH, "false")
        try:
            import tokenizers
        except ImportError as e:
            problem = "the package tokenizers is not installed"
            raise ModelError(f"{problem}; install it with: pip install 'nimble-jobs[transformers]'") from e
        try:
            made = tokenizers.Tokenizer.from_buffer(data)
        except Exception as e:  # whatever the library raises for a file that it does not like
            raise ModelError(
                f"{name}: cannot be read as a tokenizer ({first_line(e)}); expected a tokenizer.json"
            ) from e
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.rules = rules
        self.vocabulary: int = made.get_vocab_size(with_added_tokens=True)
        known = (rules.vocabulary, rules.pad_token)
        self.padding: int = rules.padding if rules.padding is not None else stand_in(made, *known)
        self._never_last = self.padding if rules.finds_end and rules.padding is None else None
        made.no_padding()
        made.no_truncation()
        _lowered(made, rules)
        self._whole = made
        single = not (rules.types or rules.offsets)
        self._words = Words.of(made) if single else None  # None: whole texts are given to the library
        self._trusted, self._trying = False, threading.Lock()
        special = max(made.num_special_tokens_to_add(is_pair=pair) for pair in (False, not rules.alone))
        if rules.limit <= special:
            raise ModelError(
                f"input.text.max_length: found {rules.limit}, but the tokenizer adds {special} tokens of its own to "
                f"{'a text' if rules.alone else 'a pair'}, which leaves none for the words; expected at least "
                f"{special + 1}"
            )

    @property
    def pad_token(self) -> str | None:
        """The special token that stands for padding; None if the padding's id has none."""
        named = self.rules.pad_token
        if named is not None and self._whole.token_to_id(named) == self.padding:
            return named
        token = self._whole.get_added_tokens_decoder().get(self.padding)
        return str(token) if token is not None and token.special else None

    def to_json(self) -> bytes:
        """The bytes of a tokenizer.json that makes the same tokens, without a limit, and lower case by itself."""
        return bytes(self._whole.to_str(), "utf-8")

    def count(self, text: str) -> int:
        """How many tokens a text has, special ones included."""
        return len(self._whole.encode(text).ids)

    @property
    def piece(self) -> int:
        """How many records it is best given at once: more if it meets the same words again."""
        return _PIECE if self._words is None else _PIECE_OF_WORDS

    def __call__(self, texts: Sequence[Text | None]) -> Tokens:
        """The tokens of these records; None makes a record without any."""
        words = self._words
        if words is not None and (ready := self._single(texts)) is not None:
            return self._by_words(words, texts, ready)
        return self._whole_texts(texts)

    def _single(self, texts: Sequence[Text | None]) -> tuple[list[str], list[int]] | None:
        """What is given of each text, and which are only parts; None if some records are no single texts."""
        given: list[str] = []
        parts: list[int] = []
        prompt, size = self.rules.prompt, _CHARACTERS * (self.rules.limit + _MARGIN)
        for row, text in enumerate(texts):
            if text is None:
                given.append("")
            elif not isinstance(text, str):
                return None
            elif len(whole := prompt + text) <= size:
                given.append(whole)
            else:
                part, long, _ = self._shortened(whole)
                given.append(part)
                if long:
                    parts.append(row)
        return given, parts

    def _by_words(self, words: Words, texts: Sequence[Text | None], ready: tuple[list[str], list[int]]) -> Tokens:
        given, parts = ready
        ids, lengths, shortened = words(given, self.rules.limit, self.rules.truncate)
        if not self._trusted:
            with self._trying:  # the first texts are given to the library, too
                if not self._trusted:
                    known = [self._left(one)[0] for one in encoded(self._whole.encode_batch_fast, given[:_TRIED])]
                    same = ids[: int(lengths[:_TRIED].sum())].tolist() == list(chain.from_iterable(known))
                    self._trusted = same and lengths[:_TRIED].tolist() == list(map(len, known))
            if not self._trusted:
                self._words = None
                return self._whole_texts(texts)
        if not words.pays:
            self._words = None
        shortened[parts] = True
        none = np.array([text is None for text in texts], dtype=bool)
        bad: dict[int, str] = {}
        if self._suspicious(ids, lengths):
            ends = np.cumsum(lengths).tolist()
            for row, (end, length) in enumerate(zip(ends, lengths.tolist(), strict=True)):
                reason = None if none[row] else self._wrong(ids[end - length : end].tolist(), known=False)
                if reason is not None:
                    bad[row] = reason
        if bad or none.any():
            none[list(bad)] = True
            ids, lengths = ids[~np.repeat(none, lengths)], np.where(none, 0, lengths).astype(np.int32)
            shortened = shortened & ~none
        return Tokens(ids=ids, types=None, offsets=None, lengths=lengths, shortened=shortened, bad=bad)

    def _suspicious(self, ids: np.ndarray, lengths: np.ndarray) -> bool:
        """Whether some text may have tokens that the model cannot be given."""
        below = self.rules.vocabulary
        unknown = below is not None and self.vocabulary > below and ids.max(initial=0) >= below
        odd = unknown or lengths.min(initial=1) < 1 or lengths.max(initial=0) > self.rules.limit
        return bool(odd or (self._never_last is not None and (ids == self._never_last).any()))

    def _whole_texts(self, texts: Sequence[Text | None]) -> Tokens:
        ready = [self._ready(text) for text in texts]
        exact = self.rules.offsets or self.rules.types  # the fast way has no offsets, and may lose the types of pairs
        encode = self._whole.encode_batch if exact else self._whole.encode_batch_fast
        bad: dict[int, str] = {}
        ids: list[Sequence[int]] = []
        types: list[Sequence[int]] = []
        offsets: list[np.ndarray] = []
        shortened = np.zeros(len(texts), dtype=bool)
        for row, one in enumerate(encoded(encode, [given for given, _, _ in ready])):
            text, (_, long, shifts) = texts[row], ready[row]
            tokens, places = self._left(one)
            if isinstance(text, TokenIds):
                tokens, long = self._shortened_ids(text.ids)
            reason = None if text is None else self._wrong(tokens, known=isinstance(text, TokenIds))
            usable = texts[row] is not None and reason is None
            if reason is not None:
                bad[row] = reason
            ids.append(tokens if usable else ())
            types.append(_at(places, one.type_ids) if usable and self.rules.types else ())
            if self.rules.offsets and usable:
                offsets.append(_offsets(one, shifts, len(tokens), places))
            shortened[row] = usable and (long or places is not None)
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        return Tokens(
            ids=_flat(ids, lengths, "int32"),
            types=_flat(types, lengths, "uint8") if self.rules.types else None,
            offsets=np.concatenate([np.empty((0, 2), np.int32), *offsets]) if self.rules.offsets else None,
            lengths=lengths,
            shortened=shortened,
            bad=bad,
        )

    def _left(self, encoding: Any) -> tuple[Sequence[int], list[int] | None]:
        """The tokens that the limit leaves of an encoding, and their places in it; None: all."""
        places = places_left(encoding, self.rules.limit, self.rules.truncate)
        return _at(places, encoding.ids), places

    def _ready(self, text: Text | None) -> tuple[str | tuple[str, str], bool, tuple[int, ...]]:
        """What the library is given; whether it is only a part of the text, because the rest would be cut; and where
        it begins in each text, in characters.
        """
        if text is None or isinstance(text, TokenIds):
            return "", False, ()
        if isinstance(text, str):
            made, long, begin = self._shortened(self.rules.prompt + text)
            return made, long, (begin - len(self.rules.prompt),)
        (first, long_first, a), (second, long_second, b) = map(self._shortened, text)
        return (first, second), long_first or long_second, (a, b)

    def _shortened(self, text: str) -> tuple[str, bool, int]:
        """The part of a very long text that fills the limit, whether it is only a part, and where it begins.

        The part grows until it has enough tokens that are those of the whole text. So memory is bounded, except for
        texts that have few tokens for their length.
        """
        size = smallest = _CHARACTERS * (self.rules.limit + _MARGIN)
        while size < len(text):
            part = text[-size:] if self.rules.truncate == "start" else text[:size]
            if self._settled(part, last_try=size >= _GROWN * smallest):
                return part, True, len(text) - size if self.rules.truncate == "start" else 0
            size *= 4
        return text, False, 0

    def _settled(self, part: str, *, last_try: bool) -> bool:
        """Whether the tokens that the limit leaves of a part are those of the whole text.

        What was cut off belongs to the word at the cut, so the tokens of all other words stay. If that word is too
        long, as in texts without spaces, the tokens must be the same for a cut elsewhere, or it is the last try. A
        model that replaces long words by one token gets no such chance.
        """
        start, enough = self.rules.truncate == "start", self.rules.limit + _MARGIN
        words, space = self._words, part.find(" ") if start else part.rfind(" ")
        if words is not None and space >= 0:
            return words.count(part[space:] if start else part[:space]) > enough
        made = self._whole.encode(part, add_special_tokens=False)
        if len(made.ids) <= enough:
            return False
        edge = made.word_ids[0 if start else -1]
        if sum(word != edge for word in made.word_ids) > enough:
            return True
        if type(self._whole.model).__name__ in BY_WORD:
            return False
        if last_try:
            return True
        other = self._whole.encode(part[1:] if start else part[:-1], add_special_tokens=False)
        limit = self.rules.limit
        return bool(made.ids[-limit:] == other.ids[-limit:] if start else made.ids[:limit] == other.ids[:limit])

    def _shortened_ids(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The known tokens that the limit leaves, and whether some are cut."""
        limit = self.rules.limit
        if len(ids) <= limit or self.rules.truncate == "error":
            return ids, False
        return ids[:limit] if self.rules.truncate == "end" else ids[-limit:], True

    def _wrong(self, tokens: Sequence[int], *, known: bool) -> str | None:
        """Why these tokens cannot be given to the model. `known`: they do not come from the tokenizer."""
        if not tokens:
            return "has no tokens; expected at least one"
        if len(tokens) > self.rules.limit:  # only if nothing is to be cut
            return f"has more than {self.rules.limit} tokens{HOW_TO_CUT}"
        if tokens[-1] == self._never_last and len(tokens) > 1:  # alone it is found all the same
            token = self._whole.id_to_token(tokens[-1])
            return (
                f"ends with the token {token!r}, which the model would take for padding; expected another last token, "
                "or a model.args.pad_token_id that no text ends with"
            )
        below = self.rules.vocabulary
        if known:
            below = below if below is not None else self.vocabulary
            largest = max(tokens)
            return None if largest < below else f"holds the token id {largest}; expected ids below {below}"
        if below is not None and self.vocabulary > below and (largest := max(tokens)) >= below:
            token = self._whole.id_to_token(largest)
            return (
                f"token {token!r} has the id {largest}; expected ids below {below}, the size of the model's vocabulary"
            )
        return None


def _lowered(tokenizer: Any, rules: TokenRules) -> None:
    """Let the tokenizer make texts lower case before anything else, as sentence-transformers does. Offsets stay those
    of the text as it was.
    """
    if rules.lower_case:
        from tokenizers.normalizers import Lowercase
        from tokenizers.normalizers import Sequence as InTurn

        own = tokenizer.normalizer
        tokenizer.normalizer = InTurn([Lowercase(), *([] if own is None else [own])])


def _at(places: Sequence[int] | None, values: Sequence[int]) -> Sequence[int]:
    return values if places is None else [values[place] for place in places]


def _offsets(encoding: Any, shifts: Sequence[int], count: int, places: Sequence[int] | None) -> np.ndarray:
    """int32 [count, 2]: where each token, or each of these, begins and ends in its text; 0 and 0 for special tokens and
    the prompt's.
    """
    if not shifts:  # token ids without a text
        return np.zeros((count, 2), dtype=np.int32)
    found = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    of = [-1 if text is None else text for text in encoding.sequence_ids]
    shift = np.array([*shifts, 0])[of]  # the last one is that of special tokens
    moved = np.maximum(found + shift[:, None], 0)
    moved[np.array(of) < 0] = 0
    return np.asarray(moved if places is None else moved[places], dtype=np.int32)


def _flat(rows: Sequence[Sequence[int]], lengths: np.ndarray, dtype: str) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=dtype, count=int(lengths.sum()))
