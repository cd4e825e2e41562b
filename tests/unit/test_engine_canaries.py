"""Parts of memory that nobody has written to are told from those that somebody has."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.engine.canaries import blank, untouched

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=8), st.integers(0, 255))
def test_parts_that_were_written_to_are_told_from_those_that_were_not(
    parts: list[tuple[int, bool]], value: int
) -> None:
    """Also parts of very few bytes, and with any one value everywhere, unless it is the fill's."""
    lengths = np.array([length for length, _ in parts], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    memory = blank(int(lengths.sum()) + 1, CPU)
    fill = int(memory[-1])
    for start, (length, written) in zip(starts.tolist(), parts, strict=True):
        if written:
            memory[start : start + length] = value
    expected = [not written or value == fill for _, written in parts]
    assert untouched(memory, starts, lengths).tolist() == expected
    assert memory[-1] == fill


def test_a_photograph_is_never_taken_for_memory_that_nobody_wrote_to() -> None:
    """Nor is a black picture, or a white one."""
    rng = np.random.default_rng(0)
    pictures = torch.from_numpy(rng.integers(0, 256, (200, 3000), dtype=np.uint8))
    pictures[0], pictures[2] = 0, 255
    memory = blank(200 * 3000, CPU)
    parts = np.arange(200) * 3000, np.full(200, 3000)
    assert untouched(memory, *parts).all()
    memory.view(200, 3000)[::2] = pictures[::2]
    assert untouched(memory, *parts).tolist() == [False, True] * 100
