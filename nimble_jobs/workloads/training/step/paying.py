"""Decides which buckets of a training on texts get a schedule: those whose build the training's own batches pay for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.device import able
from nimble_jobs.planner.lookup.obtain import OnMiss
from nimble_jobs.planner.lookup.stored import Miss, Refused
from nimble_jobs.planner.step.worth import eager_s, expected
from nimble_jobs.plural import count
from nimble_jobs.store import Store
from nimble_jobs.workloads.training.step.setup import Setup

if TYPE_CHECKING:
    from nimble_jobs.planner.step.prepare import PreparedStep

_NO_BUILD = "building would not pay"


@dataclass(frozen=True, kw_only=True)
class _Worth:
    batches: int  # of the bucket, in the whole training
    needed: float  # so many would pay for a build
    source: str  # of the estimate, in words

    @property
    def pays(self) -> bool:
        return self.batches > self.needed


class Paying:
    """Answers for each bucket whose step is not stored. What stays in eager stays so until the end of the training."""

    def __init__(self, setup: Setup, store: Store) -> None:
        self._setup = setup
        self._store = store
        self._measured: Mapping[int, float] | None = None  # size of a batch in tokens -> seconds in eager
        self._declined: list[_Worth] = []
        self._in_eager: set[int | None] = set()  # buckets, by their tokens

    def answer(self, bucket: Setup) -> OnMiss:
        """What to do about a bucket that has no stored step."""

        def decide(miss: Miss) -> Miss | Refused:
            worth = self._worth(bucket)
            if worth.pays:
                return miss
            self._declined.append(worth)
            self.keep_in_eager(bucket)
            return Refused(reason=miss.reason, fallback=_NO_BUILD)

        return decide

    def keep_in_eager(self, bucket: Setup) -> None:
        """Note that a bucket runs in eager, because the training began so. Nothing is built for its validations."""
        self._in_eager.add(bucket.tokens)

    def validation(self, bucket: Setup) -> OnMiss | None:
        """What to do about a bucket whose validations have no stored schedule; None leaves it to the spec."""
        if bucket.tokens not in self._in_eager:
            return None
        return lambda miss: Refused(reason=miss.reason, fallback="as its steps do, and none is stored")

    def settle(self, steps: Sequence[PreparedStep]) -> None:
        """Give all buckets that stay in eager one reason, so that it is told once."""
        if not self._declined:
            return
        reason = _words(self._declined)
        for one in steps:
            if one.step.fallback == _NO_BUILD:
                one.step.fallback = reason

    def _worth(self, bucket: Setup) -> _Worth:
        """Steps are only measured in buckets that could pay for some build."""
        device = self._setup.device
        costs = expected(
            self._store.schedules.builds(devices.describe(device), mode="training"),
            model=bucket.parts.get("model.source", ""),
            on_gpu=able(device).asynchronous,
            programs=len(bucket.request.programs),
        )
        needed = costs.batches()
        if bucket.batches > needed:
            needed = costs.batches(self._step_s(bucket))
        return _Worth(batches=bucket.batches, needed=needed, source=costs.source)

    def _step_s(self, bucket: Setup) -> float:
        """Seconds of a batch in eager. Those of the largest and the smallest batch are measured, others lie between."""
        if self._measured is None:
            by_size = {_size(each): each for each in self._setup.each}
            sizes = sorted({min(by_size), max(by_size)})
            self._measured = {size: eager_s(by_size[size].request, self._setup.device) for size in sizes}
        return float(np.interp(_size(bucket), list(self._measured), list(self._measured.values())))


def _size(bucket: Setup) -> int:
    """Tokens of a batch, padding included."""
    return int(bucket.request.x.shape[0]) * (bucket.tokens or 1)


def _words(declined: Sequence[_Worth]) -> str:
    """Why these are not built, all together."""
    batches, ahead = sum(worth.batches for worth in declined), "nimble-jobs cache build SPEC builds ahead"
    nearest = max(declined, key=lambda worth: worth.batches / worth.needed)
    if math.isinf(nearest.needed):
        return f"{_NO_BUILD}: replays are no faster than eager here ({nearest.source}); {ahead}"
    return (
        f"{_NO_BUILD}: {count(batches, 'batch')} are too few; a build takes as long as schedules save in about "
        f"{nearest.needed:,.0f} batches of a bucket ({nearest.source}); {ahead}"
    )
