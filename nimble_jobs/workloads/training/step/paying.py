"""Decides which steps of a training get a schedule: those whose build the training's own batches pay for.

Texts have a step for each bucket, other records one step.
"""

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
from nimble_jobs.plural import count, plural
from nimble_jobs.store import Store
from nimble_jobs.workloads.training.step.setup import Setup

if TYPE_CHECKING:
    from nimble_jobs.planner.step.prepare import PreparedStep

_NO_BUILD = "building would not pay"


@dataclass(frozen=True, kw_only=True)
class _Worth:
    batches: int  # of the step, in the whole training
    needed: float  # so many would pay for a build
    source: str  # of the estimate, in words

    @property
    def pays(self) -> bool:
        return self.batches > self.needed


class Paying:
    """Answers for each step that is not stored. What stays in eager stays so until the end of the training."""

    def __init__(self, setup: Setup, store: Store) -> None:
        self._setup = setup
        self._store = store
        self._measured: Mapping[int, float] | None = None  # size of a batch in tokens -> seconds in eager
        self._declined: list[_Worth] = []
        self._in_eager: set[int | None] = set()  # buckets, by their tokens; None: the only step

    def answer(self, shape: Setup) -> OnMiss:
        """What to do about batches of a shape that have no stored step."""

        def decide(miss: Miss) -> Miss | Refused:
            worth = self._worth(shape)
            if worth.pays:
                return miss
            self._declined.append(worth)
            self.keep_in_eager(shape)
            return Refused(reason=miss.reason, fallback=_NO_BUILD)

        return decide

    def keep_in_eager(self, shape: Setup) -> None:
        """Note that a step stays in eager. Nothing is built for its validations."""
        self._in_eager.add(shape.tokens)

    def validation(self, shape: Setup) -> OnMiss | None:
        """What to do about validations that have no stored schedule; None leaves it to the spec."""
        if shape.tokens not in self._in_eager:
            return None
        return lambda miss: Refused(reason=miss.reason, fallback="as its steps do, and none is stored")

    def settle(self, steps: Sequence[PreparedStep]) -> None:
        """Give all steps that stay in eager one reason, so that it is told once."""
        if not self._declined:
            return
        reason = _words(self._declined, each=" of a bucket" if self._setup.tokens is not None else "")
        for one in steps:
            if one.step.fallback == _NO_BUILD:
                one.step.fallback = reason

    def _worth(self, shape: Setup) -> _Worth:
        """Steps are only measured where the batches could pay for some build."""
        device = self._setup.device
        costs = expected(
            self._store.schedules.builds(devices.describe(device), mode="training"),
            model=shape.parts.get("model.source", ""),
            on_gpu=able(device).asynchronous,
            texts=shape.tokens is not None,
            programs=len(shape.request.programs),
        )
        needed = costs.batches()
        if shape.batches > needed:
            needed = costs.batches(self._step_s(shape))
        return _Worth(batches=shape.batches, needed=needed, source=costs.source)

    def _step_s(self, shape: Setup) -> float:
        """Seconds of a batch in eager. Those of the largest and the smallest batch are measured, others lie between."""
        if self._measured is None:
            by_size = {_size(each): each for each in self._setup.each}
            sizes = sorted({min(by_size), max(by_size)})
            self._measured = {size: eager_s(by_size[size].request, self._setup.device) for size in sizes}
        return float(np.interp(_size(shape), list(self._measured), list(self._measured.values())))


def _size(shape: Setup) -> int:
    """Tokens of a batch, padding included; its records if they are no texts."""
    return int(shape.request.x.shape[0]) * (shape.tokens or 1)


def _words(declined: Sequence[_Worth], *, each: str) -> str:
    """Why these are not built, all together; `each` names what the batches of one step are."""
    batches, ahead = sum(worth.batches for worth in declined), "nimble-jobs cache build SPEC builds for later trainings"
    nearest = max(declined, key=lambda worth: worth.batches / worth.needed)
    if math.isinf(nearest.needed):
        return f"{_NO_BUILD}: replays are no faster than eager here ({nearest.source}); {ahead}"
    return (
        f"{_NO_BUILD}: {count(batches, 'batch')} {plural(batches, 'is')} too few; a build takes as long as schedules "
        f"save in about {nearest.needed:,.0f} batches{each} ({nearest.source}); {ahead}"
    )
