"""Texts as tokens in rows of one length."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from nimble_jobs.data.text.tokenizer import Tokenizer
from nimble_jobs.data.text.values import Text
from nimble_jobs.packing import Part, text_layout


class FixedRows:
    """Tokenizes texts into rows that are as long as the longest text may be. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, *, padding: int, vocabulary: int) -> None:
        """`padding` is the token id behind a text; token ids are below `vocabulary`."""
        self.parts: tuple[Part, ...] = text_layout(tokenizer.rules.limit, vocabulary=vocabulary).parts
        self.cut = 0  # texts that lost tokens so far
        self._tokenizer, self._padding = tokenizer, padding
        self._counting = threading.Lock()

    def fill(self, fields: np.ndarray, texts: Sequence[Text | None]) -> dict[int, str]:
        """Write the tokens of a text to each row of `fields`, as `fill` does; why texts are bad, by row."""
        found = self._tokenizer(texts)
        starts = np.cumsum(found.lengths) - found.lengths
        fill(fields, found.ids, None, starts, found.lengths, self._padding)
        with self._counting:
            self.cut += found.cut
        return found.bad


AsTokens = Callable[[], FixedRows]  # opens the tokenizer of a job


def fill(
    fields: np.ndarray,
    ids: np.ndarray,
    types: np.ndarray | None,
    starts: np.ndarray,
    lengths: np.ndarray,
    padding: int,
) -> None:
    """Write tokens to rows of a text layout. Record i has `lengths[i]` tokens from `starts[i]` on.

    `fields` is a structured array [n] with input_ids int32 [length] and attention_mask int32, and token_type_ids uint8
    [length] if there are `types`.
    """
    target = fields["input_ids"]
    places = np.arange(target.shape[1])
    inside = places < lengths[:, None]
    of = (starts[:, None] + places)[inside]
    target[:] = padding
    target[inside] = ids[of]
    fields["attention_mask"] = lengths
    if types is not None:
        fields["token_type_ids"][inside] = types[of]
