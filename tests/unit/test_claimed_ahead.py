"""Batches of one claim after another: the same ones, in order; the next claim is made in time, and not too soon."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.workloads.claimed_ahead import in_a_row
from nimble_jobs.workloads.cuts import Bounds
from tests.waiting import PATIENCE_S


def batches(first: int, count: int) -> list[Bounds]:
    return [Bounds(shard=n, start=n, stop=n + 1, last=True, left=1) for n in range(first, first + count)]


@given(counts=st.lists(st.integers(1, 5), max_size=5), early=st.integers(0, 6))
def test_all_batches_in_order(counts: list[int], early: int) -> None:
    """The claim behind a batch is made only once so many are left of its own."""
    made: list[int] = []

    def claims() -> Generator[list[Bounds]]:
        first = 0
        for count in counts:
            made.append(count)
            yield batches(first, count)
            first += count

    found = []
    for at in in_a_row(claims(), max(1, early)):
        found.append(at.shard)
        done, claim = len(found), 0
        while done > sum(counts[: claim + 1]):
            claim += 1
        may = sum(counts[: claim + 1]) - done < max(1, early)
        assert claim + 1 <= len(made) <= claim + 1 + may
    assert found == list(range(sum(counts)))
    assert made == counts


def test_the_next_claim_is_made_meanwhile() -> None:
    """Whoever takes batches goes on with those that are there."""
    taken = threading.Event()

    def claims() -> Generator[list[Bounds]]:
        yield batches(0, 3)
        assert taken.wait(PATIENCE_S)
        yield batches(3, 1)

    row = in_a_row(claims(), 3)
    assert [next(row).shard for _ in range(3)] == [0, 1, 2]
    taken.set()
    assert [at.shard for at in row] == [3]


def test_a_claim_that_fails() -> None:
    """The batches before it come first."""

    def claims() -> Generator[list[Bounds]]:
        yield batches(0, 2)
        raise OSError("no answer")

    row = in_a_row(claims(), 2)
    assert [next(row).shard for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="no answer"):
        next(row)


@pytest.mark.parametrize("fails", [False, True])
def test_closing_waits_for_a_claim(fails: bool) -> None:
    """Or what it took would be kept from others for ever. How it ends does not matter any more."""
    begun, over = threading.Event(), list[str]()
    release = threading.Event()

    def claims() -> Generator[list[Bounds]]:
        try:
            yield batches(0, 1)
            begun.set()
            assert release.wait(PATIENCE_S)
            over.append("claimed")
            if fails:
                raise OSError("no answer")
            yield batches(1, 1)
        finally:
            over.append("closed")

    row = in_a_row(claims(), 1)
    assert next(row).shard == 0
    assert begun.wait(PATIENCE_S)
    threading.Timer(0.05, release.set).start()
    row.close()
    assert over == ["claimed", "closed"]


def test_closing_before_the_first() -> None:
    over = list[str]()

    def claims() -> Generator[list[Bounds]]:
        try:
            yield batches(0, 1)
        finally:
            over.append("closed")

    made = claims()
    row = in_a_row(made)
    assert next(row).shard == 0
    row.close()
    assert over == ["closed"]
