"""The lengths to which texts are padded."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.buckets import candidates, choose, padding_share, rows_of, shares

HISTOGRAMS = st.dictionaries(st.integers(1, 60), st.integers(1, 50), min_size=1, max_size=12)


def cost(lengths: dict[int, int], buckets: tuple[int, ...], price: float) -> float:
    """What `choose` minimises, computed text by text."""
    total = sum(length * n for length, n in lengths.items())
    padded = sum(n * next(b for b in buckets if b >= length) for length, n in lengths.items())
    return padded + len(buckets) * price * total


@given(HISTOGRAMS, st.sampled_from([0.0, 0.005, 0.05, 0.5]))
def test_no_other_choice_is_cheaper(lengths: dict[int, int], price: float) -> None:
    """Against all subsets of the candidate lengths."""
    found = choose(lengths, limit=64, price=price)
    ends = candidates(lengths, 64)
    if len(ends) > 8:  # too many subsets
        return
    every = [(*some, ends[-1]) for k in range(len(ends)) for some in combinations(ends[:-1], k)]
    best = min(cost(lengths, one, price) for one in every)
    assert cost(lengths, found, price) == pytest.approx(best)


@given(HISTOGRAMS, st.integers(60, 70), st.sets(st.integers(1, 80), max_size=4))
def test_every_text_has_a_bucket(lengths: dict[int, int], limit: int, stored: set[int]) -> None:
    """Buckets ascend, hold the longest text, and never exceed what the model takes."""
    found = choose(lengths, limit=limit, stored=stored)
    assert list(found) == sorted(set(found))
    assert max(lengths) <= found[-1] <= limit
    assert all(b % (2 if b <= 32 else 4 if b <= 64 else 8) == 0 or b == limit or b in stored for b in found)
    assert sum(shares(lengths, found)) == pytest.approx(1)
    assert 0 <= padding_share(lengths, found) < 1


def test_stored_buckets_are_taken_if_they_serve_nearly_as_well() -> None:
    """The texts of the next night differ a little, and must not cost new schedules."""
    tonight = dict(Counter(np.random.default_rng(1).lognormal(4, 0.7, 5_000).clip(3, 256).astype(int).tolist()))
    tomorrow = dict(Counter(np.random.default_rng(2).lognormal(4.05, 0.7, 5_000).clip(3, 256).astype(int).tolist()))
    stored = choose(tonight, limit=256)
    assert choose(tomorrow, limit=256) != stored
    assert set(choose(tomorrow, limit=256, stored=stored)) <= set(stored)
    assert choose({128: 5}, limit=512, stored=(132,)) == (132,)
    assert choose({128: 5}, limit=512, stored=(512,)) == (128,), "four times the tokens is no bargain"
    assert choose({128: 5}, limit=512, stored=(120,)) == (128,), "too short for the longest text"


def test_a_high_price_leaves_one_bucket() -> None:
    """And a price of zero gives each length its own."""
    lengths = {10: 5, 30: 5, 50: 5}
    assert choose(lengths, limit=64, price=10.0) == (52,)
    assert choose(lengths, limit=64, price=0.0) == (10, 30, 52)


@pytest.mark.parametrize("median", [12, 40, 90, 200])
@pytest.mark.parametrize("sigma", [0.3, 0.6, 0.9, 1.2])
def test_texts_of_usual_lengths_are_padded_little(median: int, sigma: float) -> None:
    """Less than a tenth of all tokens for log-normal corpora, also of short texts."""
    drawn = np.random.default_rng(7).lognormal(np.log(median), sigma, 5_000)
    lengths = dict(Counter(np.clip(drawn, 3, 512).astype(int).tolist()))
    found = choose(lengths, limit=512)
    assert padding_share(lengths, found) < 0.1
    assert len(found) <= 24


def test_no_bucket_is_longer_than_the_limit() -> None:
    """A model of 77 positions gets a bucket of 77, not of 80."""
    assert choose({75: 3, 77: 1}, limit=77)[-1] == 77


@pytest.mark.parametrize(
    ("length", "tokens", "rows"), [(32, 16384, 512), (8, 16384, 1024), (512, 16384, 32), (512, 512, 1), (100, 1000, 8)]
)
def test_rows_of_a_batch(length: int, tokens: int, rows: int) -> None:
    """Tokens over length, rounded down to a multiple of 8 from 8 on, and never 0 or above 1,024."""
    assert rows_of(length, tokens) == rows


@given(st.integers(1, 4096), st.integers(1, 1 << 16))
def test_a_batch_has_a_row_and_no_more_tokens_than_asked_for(length: int, tokens: int) -> None:
    rows = rows_of(length, tokens)
    assert rows >= 1
    assert rows == 1 or rows * length <= tokens


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="no lengths"):
        choose({}, limit=8)
    with pytest.raises(ValueError, match="expected 1 to 8"):
        choose({9: 1}, limit=8)
