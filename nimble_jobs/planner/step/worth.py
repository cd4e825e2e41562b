"""Whether a training is long enough to pay for building a step's schedule: what a build takes, and what it saves.

The estimate comes from builds that the store remembers or, if it remembers none, from `docs/measurements` and decision
0080.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from nimble_jobs.engine import measure
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.step.build import step_tolerance
from nimble_jobs.planner.step.eager import EagerStep
from nimble_jobs.planner.step.live import LiveStep
from nimble_jobs.planner.step.request import StepRequest
from nimble_jobs.plural import count
from nimble_jobs.store.schedules import BuildFacts

_BRIEFLY_S = 0.03
_OF_TEXTS = re.compile(r"x:uint8\[\d+, \d+\],")  # rows of bytes, which hold tokens
_MOST_RATIO = 0.98  # that builds of other models can lead to


@dataclass(frozen=True, kw_only=True)
class _Defaults:
    """A build takes `build_s` and, for each second of one step in eager, `build_steps` seconds more."""

    build_s: float
    build_steps: float
    ratio: float


# On an H200 the four buckets of BERT-base took 48 s each, beside other builds (text.md), where a step takes about 20 ms
# in eager; over twelve networks a step took 0.08 to 0.45 of eager's time (h200-train.md).
_GPU = _Defaults(build_s=10.0, build_steps=1500.0, ratio=0.45)
# On two cores the buckets of 24 and 48 tokens of MiniLM, steps of 181 and 353 ms, took 46 s together, and their
# replays 0.98 and 0.99 of eager's time (text.md).
_CPU_TEXTS = _Defaults(build_s=8.0, build_steps=55.0, ratio=0.97)
# On two cores steps of convolutional networks, 10 to 585 ms, took 2 to 31 s, and their replays 0.52 to 1 of eager's
# time, in the middle 0.85 (decision 0080). A build that brings nothing should then take 0.15 of the training's time.
_CPU = _Defaults(build_s=4.0, build_steps=45.0, ratio=0.85)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What building a step is expected to take and to bring."""

    build_s: float  # of all its programs, and beside that
    build_steps: float  # seconds for each second of a step in eager
    ratio: float  # the step's time divided by eager's, at most 1
    source: str  # where these figures come from, in words

    def batches(self, step_s: float = math.inf) -> float:
        """From how many batches on a build saves more than it takes; infinity if it saves nothing.

        Without the seconds of a step in eager, the least number for any step.
        """
        return (self.build_s / step_s + self.build_steps) / (1 - self.ratio) if self.ratio < 1 else math.inf


def expected(
    builds: Sequence[BuildFacts], *, model: str, on_gpu: bool, texts: bool = False, programs: int = 1
) -> StepCosts:
    """Costs for a step of so many programs. `builds`: of training steps on this device, as the store remembers them,
    one for each program.

    Builds of the same model count alone if there are any, else those of the same kind, texts or not, beside what is
    expected without them. Ratios are medians, and so are the times of builds, as shares of what is expected. Only a
    model's own builds can say that nothing is gained, or none would be built that could say otherwise.
    """
    defaults = _GPU if on_gpu else _CPU_TEXTS if texts else _CPU
    own = [build for build in builds if build.model == model]
    known = own or [build for build in builds if bool(_OF_TEXTS.match(build.input)) is texts]
    share, ratio = 1.0, defaults.ratio
    if known:
        shares = [programs * b.build_s / _build_s(defaults, b.eager_us / 1e6) for b in known]
        ratios = [b.replay_us / b.eager_us if b.runs == "schedule" else 1.0 for b in known]
        share = median(shares if own else [*shares, share])
        ratio = min(1.0 if own else _MOST_RATIO, median(ratios if own else [*ratios, ratio]))
    if own:
        source = f"estimated from {count(len(own), 'earlier build')} of this model's steps on this device"
    elif known:
        source = f"estimated from {count(len(known), 'build')} of other models' steps on this device"
    else:
        source = "estimated from other machines, as this one has built no training step yet"
    return StepCosts(
        build_s=share * defaults.build_s, build_steps=share * defaults.build_steps, ratio=ratio, source=source
    )


def eager_s(request: StepRequest, device: torch.device) -> float:
    """Seconds of one step in eager, measured by a few. Weights, state and random states keep their values."""
    live = LiveStep(request, EagerStep(request, device), device, tolerance=step_tolerance(request, device))
    with restoring_state(live.eager.arithmetic.objective, device), torch.inference_mode(False):
        try:
            return measure.time_us(live.in_eager, device, budget_s=_BRIEFLY_S) / 1e6
        finally:
            live.restore()


def _build_s(defaults: _Defaults, step_s: float) -> float:
    return defaults.build_s + defaults.build_steps * step_s
