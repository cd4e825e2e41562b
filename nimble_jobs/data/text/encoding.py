"""What the library `tokenizers` makes of texts: some at a time, and cut to a limit.

The library's own truncation keeps everything that it cuts off. Of a pair it even keeps each rest of one text with each
rest of the other, which for two texts without spaces took gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

_AT_ONCE = 1 << 20  # characters; each takes about 150 bytes while it is tokenized


def encoded(encode: Callable[[Sequence[Any]], list[Any]], given: Sequence[str | tuple[str, str]]) -> Iterator[Any]:
    """The encodings of texts and pairs, in order. `encode` makes those of a batch."""
    first = size = 0
    for row, one in enumerate(given):
        more = len(one) if isinstance(one, str) else len(one[0]) + len(one[1])
        if size and size + more > _AT_ONCE:
            yield from encode(given[first:row])
            first, size = row, 0
        size += more
    yield from encode(given[first:])


def places_left(encoding: Any, limit: int, truncate: Literal["end", "start", "error"]) -> list[int] | None:
    """Which tokens of an encoding a limit leaves, as the library's `longest_first` cuts; None: all of them.

    `encoding` has special tokens. A text loses tokens at its end or start, and of a pair the longer one loses them
    first. "error" cuts nothing.
    """
    if truncate == "error" or len(encoding) <= limit:
        return None
    of = encoding.sequence_ids  # None for special tokens
    first, second = ([place for place, text in enumerate(of) if text == number] for number in (0, 1))
    lost: set[int] = set()
    room = limit - of.count(None)
    for places, left in zip((first, second), _shares(len(first), len(second), room), strict=True):
        lost.update(places[left:] if truncate == "end" else places[: len(places) - left])
    return [place for place in range(len(of)) if place not in lost]


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are left, of these many."""
    half = room // 2
    if min(first, second) <= half:
        return (first, room - first) if first <= second else (room - second, second)
    return (half, room - half) if first <= second else (room - half, half)
