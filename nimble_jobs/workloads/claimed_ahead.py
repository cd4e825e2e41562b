"""The batches of one claim after another, without a pause in between."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, suppress

from nimble_jobs.pipeline import Beside
from nimble_jobs.workloads.cuts import Bounds

EARLY = 8  # batches that are left of a claim when the next one is made: replays of these take longer than a claim


def in_a_row(claims: Generator[Sequence[Bounds]], early: int = EARLY) -> Generator[Bounds]:
    """The batches of all claims. The next claim is made beside whoever takes batches, once `early` of one are left, and
    not sooner: what one member has claimed, no other can do.

    Raises what a claim raises, after the batches before it. Closing the generator waits for a claim that is being made.
    """
    made: list[Sequence[Bounds]] = []
    coming: Beside | None = None

    def claim() -> None:
        made.append(next(claims, ()))

    with closing(claims):
        claim()
        try:
            while bounds := made.pop():
                for place, at in enumerate(bounds):
                    if coming is None and len(bounds) - place <= early:
                        coming = Beside(claim, name="nimble-claims")
                    yield at
                assert coming is not None
                coming.wait()
                coming = None
        finally:
            if coming is not None:
                with suppress(Exception):  # either it is being raised, or nobody wants batches any more
                    coming.wait()
