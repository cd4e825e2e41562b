"""The lengths to which texts are padded. Each is a bucket: one schedule serves all texts of up to that many tokens.

Few buckets pad much, and many cost a build each. `choose` weighs the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

STEP = 8  # bucket lengths above 64 are multiples of this, as matrix units like them
MOST = 24  # buckets chosen at most
PRICE = 0.003  # of a bucket: this share of all tokens
STORED_IS_WORTH = 0.05  # share of more tokens that is accepted if no schedule needs to be built
MOST_ROWS = 1024  # records in a batch, at most
_FINE = ((32, 2), (64, 4))  # up to so many tokens: the step, since 8 tokens would be much of a short text
_COARSE = 256  # longer lengths that are considered, at most, beside stored ones

Histogram = Mapping[int, int]  # tokens -> texts of that length; each at least 1


def choose(
    lengths: Histogram, *, limit: int, price: float = PRICE, stored: Collection[int] = (), most: int = MOST
) -> tuple[int, ...]:
    """Bucket lengths, ascending, that minimise padded tokens plus a price for each bucket, a share of all tokens.

    They are among `candidates`, up to `limit`, the most tokens of any text; the last one holds the longest text of
    `lengths`. If the lengths in `stored`, whose schedules exist, serve nearly as well, the best of
    those are taken. Raises ValueError without lengths, or for a length outside 1 to `limit`.
    """
    if not lengths:
        raise ValueError("no lengths")
    if min(lengths) < 1 or max(lengths) > limit:
        raise ValueError(f"lengths from {min(lengths)} to {max(lengths)}; expected 1 to {limit}")
    best = _cheapest(lengths, candidates(lengths, limit), price, most)
    known = sorted({end for end in stored if min(lengths) <= end <= limit})
    if known and known[-1] >= max(lengths):
        longest = next(i for i, end in enumerate(known) if end >= max(lengths))
        kept = _cheapest(lengths, known[: longest + 1], price, most)
        if padded_tokens(lengths, kept) <= (1 + STORED_IS_WORTH) * padded_tokens(lengths, best):
            return kept
    return best


def candidates(lengths: Iterable[int], limit: int) -> list[int]:
    """The bucket length next to each of these lengths, ascending: multiples of 2 up to 32, of 4 up to 64, of STEP or a
    multiple of it above; or `limit`.
    """
    coarse = -(-limit // (_COARSE * STEP)) * STEP
    steps = ((n, next((step for end, step in _FINE if n <= end), coarse)) for n in lengths)
    return sorted({min(limit, -(-n // step) * step) for n, step in steps})


def _cheapest(lengths: Histogram, ends: Sequence[int], price: float, most: int) -> tuple[int, ...]:
    """The best choice among `ends`, ascending, of which the last holds all texts.

    With B ends it takes O(most B^2) steps: the segmentation of Bellman, "On the approximation of curves by line
    segments using dynamic programming" (Communications of the ACM 4, 1961), where a segment costs its texts times its
    upper end.
    """
    below = [0, *accumulate(_counts(lengths, ends))]  # texts that are no longer than each end
    each = price * sum(length * count for length, count in lengths.items())
    # best[j]: the cost of all texts up to ends[j], whose bucket is the last of those chosen so far
    best = [below[j + 1] * end + each for j, end in enumerate(ends)]
    before: list[list[int]] = [[-1] * len(ends)]
    least, used = best[-1], 1
    for count in range(2, min(most, len(ends)) + 1):
        more, origin = [float("inf")] * len(ends), [-1] * len(ends)
        for j, end in enumerate(ends):
            for i in range(count - 2, j):
                cost = best[i] + (below[j + 1] - below[i + 1]) * end + each
                if cost < more[j]:
                    more[j], origin[j] = cost, i
        best = more
        before.append(origin)
        if best[-1] < least:
            least, used = best[-1], count
    chosen, at = [], len(ends) - 1
    for origin in reversed(before[:used]):
        chosen.append(ends[at])
        at = origin[at]
    return tuple(reversed(chosen))


def rows_of(length: int, tokens_per_batch: int) -> int:
    """Records in a batch of a bucket: at least 1, at most MOST_ROWS, and a multiple of 8 from 8 on."""
    rows = max(1, min(MOST_ROWS, tokens_per_batch // length))
    return rows if rows < STEP else rows // STEP * STEP


def padded_tokens(lengths: Histogram, buckets: Sequence[int]) -> int:
    """All tokens that the model is given, padding included, if every batch is full."""
    return sum(end * count for end, count in zip(buckets, _counts(lengths, buckets), strict=True))


def padding_share(lengths: Histogram, buckets: Sequence[int]) -> float:
    """The share of padding in all tokens that the model is given, if every batch is full: 0 to 1."""
    return 1 - sum(length * count for length, count in lengths.items()) / padded_tokens(lengths, buckets)


def shares(lengths: Histogram, buckets: Sequence[int]) -> list[float]:
    """The share of all texts in each bucket."""
    total = sum(lengths.values())
    return [count / total for count in _counts(lengths, buckets)]


def _counts(lengths: Histogram, ends: Sequence[int]) -> list[int]:
    """Texts in each bucket."""
    edges = [0, *ends]
    return [sum(n for length, n in lengths.items() if low < length <= high) for low, high in pairwise(edges)]
