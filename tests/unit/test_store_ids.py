"""Job ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.store.ids import ALPHABET, LENGTH, is_prefix, new_id, random_id

TIMES = st.floats(1.72e9, 2.7e9)


@given(a=TIMES, b=TIMES)
def test_sortable(a: float, b: float) -> None:
    """Ids sort by time, to the millisecond, and look like ids."""
    first, second = new_id(min(a, b)), new_id(max(a, b))
    assert len(first) == LENGTH
    assert set(first) <= set(ALPHABET)
    assert first[:8] <= second[:8], "40 bits of time are eight characters"
    assert is_prefix(first)


def test_distinct() -> None:
    """A hundred ids of one millisecond differ, but for rare luck."""
    assert len({new_id(1.8e9) for _ in range(100)}) >= 99
    assert len({random_id(8) for _ in range(100)}) == 100


@given(st.floats(-1e12, 1e12))
def test_any_clock(now: float) -> None:
    """A clock that is far off still gives an id."""
    assert is_prefix(new_id(now))


def test_prefix() -> None:
    """Three characters, other letters, or too many are no prefix."""
    assert is_prefix("0a1b")
    assert not any(is_prefix(text) for text in ("0a1", "0a1l", "0A1B", "0" * 13, "", "0a1%"))
