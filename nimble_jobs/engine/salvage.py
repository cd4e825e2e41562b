"""Runs work on batches so that one bad item does not fail its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def salvage(
    items: Sequence[T], work: Callable[[list[T]], Sequence[R]], failed: Callable[[int, RuntimeError], None]
) -> list[R | None]:
    """The result of `work` for each item, in order; None for an item for which it raises RuntimeError even alone.

    A batch that fails is halved. `failed` is called with the position of an item that failed alone and with the error,
    which it may raise. With k bad items among n, `work` is called O(k log n) times, and O(log n) times for each item.
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
    """Consecutive ranges [start, stop) of sizes that add up to at most `most`. A larger item is alone in its range."""
    ranges, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            ranges.append((start, i))
            start, total = i, 0
        total += size
    return [*ranges, (start, len(sizes))] if sizes else []
