"""Batches that fail are halved until what is bad is alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.engine.salvage import portions, salvage


class Work:
    """Squares numbers; a batch with a bad one fails."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.calls = bad, 0

    def __call__(self, items: list[int]) -> list[int]:
        self.calls += 1
        if self.bad & set(items):
            raise RuntimeError("a bad one")
        return [i * i for i in items]


@given(st.integers(0, 70), st.sets(st.integers(0, 69)))
def test_only_what_is_bad_fails(count: int, bad: set[int]) -> None:
    work, failed = Work(bad), []
    found = salvage(range(count), work, lambda i, e: failed.append((i, str(e))))
    assert found == [None if i in bad else i * i for i in range(count)]
    assert failed == [(i, "a bad one") for i in sorted(bad) if i < count]
    assert work.calls <= 1 + 2 * 7 * len(bad)


def test_a_good_batch_is_one_call() -> None:
    work = Work(set())
    salvage(range(64), work, lambda *_: None)
    assert work.calls == 1


def test_an_error_that_no_item_is_to_blame_for_is_raised() -> None:
    def blames_nobody(_: int, error: RuntimeError) -> None:
        raise MemoryError from error

    with pytest.raises(MemoryError):
        salvage(range(4), Work({2}), blames_nobody)
    with pytest.raises(ZeroDivisionError):
        salvage(range(4), lambda _: [1 // 0], lambda *_: None)


@given(st.lists(st.integers(1, 50)), st.integers(1, 100))
def test_portions_cover_all_and_keep_the_bound(sizes: list[int], most: int) -> None:
    found = portions(sizes, most)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(len(sizes)))
    assert all(start < stop for start, stop in found)
    assert all(sum(sizes[start:stop]) <= most or stop == start + 1 for start, stop in found)
    assert all(sum(sizes[a:c]) + sizes[c] > most for (a, c), _ in pairwise(found))
