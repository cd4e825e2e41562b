"""One bad item must not fail its batch: work on batches that ends up with what is bad alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def salvage(
    items: Sequence[T], work: Callable[[list[T]], Sequence[R]], failed: Callable[[int, RuntimeError], None]
) -> list[R | None]:
    """What `work` makes of each item, in order; None for each item that it raises RuntimeError for, even alone.

    A batch that fails is halved. `failed` gets the position of an item that failed alone, and the error, and may raise
    it. With k bad ones among n items, `work` is called O(k log n) times, and each item goes through it O(log n) times.
    """
    results: list[R | None] = [None] * len(items)
    waiting = [(0, len(items))] if items else []
    while waiting:
        start, stop = waiting.pop()
        try:
            made = work(list(items[start:stop]))
        except RuntimeError as e:
            if stop - start == 1:
                failed(start, e)
                continue
            middle = (start + stop) // 2
            waiting += [(middle, stop), (start, middle)]
            continue
        results[start:stop] = made
    return results


def portions(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Consecutive ranges [start, stop) whose sizes add up to at most `most`; what is larger is alone."""
    if sizes and sum(sizes) <= most:
        return [(0, len(sizes))]
    ranges, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            ranges.append((start, i))
            start, total = i, 0
        total += size
    return [*ranges, (start, len(sizes))] if sizes else []
