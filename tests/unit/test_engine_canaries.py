"""Parts of memory that nobody has written to are told from those that somebody has."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.engine.canaries import Canaries


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=8), st.integers(0, 255))
def test_parts_that_were_written_to_are_told_from_those_that_were_not(
    parts: list[tuple[int, bool]], value: int
) -> None:
    """Also parts of very few bytes, and with any one value everywhere, unless it is the canary of a single byte."""
    lengths = np.array([length for length, _ in parts], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    memory = torch.zeros(int(lengths.sum()) + 1, dtype=torch.uint8)
    canaries = Canaries(memory, starts, lengths)
    before = memory.clone()
    for start, (length, written) in zip(starts.tolist(), parts, strict=True):
        if written:
            memory[start : start + length] = value
    expected = [
        not written or bool((before[a : a + n] == value).all()) for a, (n, written) in zip(starts, parts, strict=True)
    ]
    assert canaries.untouched().tolist() == expected
    assert memory[-1] == 0


def test_a_photograph_is_never_taken_for_memory_that_nobody_wrote_to() -> None:
    rng = np.random.default_rng(0)
    pictures = torch.from_numpy(rng.integers(0, 256, (200, 3000), dtype=np.uint8))
    memory = torch.zeros(200 * 3000, dtype=torch.uint8)
    canaries = Canaries(memory, np.arange(200) * 3000, np.full(200, 3000))
    assert canaries.untouched().all()
    memory.view(200, 3000)[::2] = pictures[::2]
    assert canaries.untouched().tolist() == [False, True] * 100
