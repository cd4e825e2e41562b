"""Which token stands behind a text in a row."""

from __future__ import annotations

from typing import Any

_NAMES = ("[PAD]", "<pad>")  # of tokens for padding, in tokenizers that do not say which one it is


def own_padding(tokenizer: Any, name: str | None) -> int | None:
    """The id of the token that a tokenizer of the library keeps for padding; None if it keeps none.

    `name` is the token that the files beside the tokenizer name, if they do.
    """
    if name is not None and (number := tokenizer.token_to_id(name)) is not None:
        return int(number)
    settings = tokenizer.padding or {}
    if settings.get("pad_id"):  # 0 may be a default that nobody has chosen
        return int(settings["pad_id"])
    named = (tokenizer.token_to_id(name) for name in _NAMES)
    return next((found for found in named if found is not None), settings.get("pad_id"))


def stand_in(tokenizer: Any, vocabulary: int | None, name: str | None = None) -> int:
    """A token id for the padding of a model that names none, or one that is not among its `vocabulary` ids.

    Models that classify by a text's last token look for the last one that is no padding. So this is the tokenizer's own
    padding, else an id that no token has, else a special token; but no token that the tokenizer puts last itself. 0 if
    there is none of these. `name` is as for `own_padding`.
    """
    own = own_padding(tokenizer, name)
    if vocabulary is None:
        return own if own is not None and own < tokenizer.get_vocab_size(with_added_tokens=True) else 0
    last = {ids[-1] for text in ("", "a") if (ids := tokenizer.encode(text).ids)}
    if own is not None and own < vocabulary and own not in last:
        return own
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    free = next((number for number in reversed(range(vocabulary)) if number not in known), None)
    if free is not None:
        return free
    special = sorted(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return next((number for number in special if number < vocabulary and number not in last), 0)
