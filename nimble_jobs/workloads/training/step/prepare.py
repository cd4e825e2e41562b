"""The schedules of a training: taken from the store or built now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.private.compilers import keeping_compilers
from nimble_jobs.job import Hit
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.keys.step import forward_parts, program_key
from nimble_jobs.planner.lookup.obtain import Waiting, by_spec
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step.build import EagerStep, TrainingStep, step_tolerance
from nimble_jobs.planner.step.prepare import PreparedStep, eager_by_choice, prepare_stored_step
from nimble_jobs.planner.step.several import SeveralSteps
from nimble_jobs.planner.step.validation import PreparedForward, prepare_forward
from nimble_jobs.store import Store
from nimble_jobs.workloads.training.step.paying import Paying
from nimble_jobs.workloads.training.step.setup import Setup
from nimble_jobs.workloads.training.step.validation import Forward


@dataclass(frozen=True, kw_only=True)
class Means:
    """Where schedules come from, what happens on a miss, and who hears of it."""

    store: Store
    on_miss: str
    report: Callable[..., None]  # report(phase=...) of a step
    trying: Callable[[str], None]  # each candidate for validations
    waiting: Waiting
    around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()  # each build, which it is told
    paying: Paying | None = None  # decides on misses of a new training; None: `on_miss` does


def prepare_step(
    setup: Setup, means: Means, *, began_with: Source | Literal["eager"] | None = None, began: bool = False
) -> PreparedStep:
    """The best step, stored or built now; for an interrupted training, which `began`, the kind of step that it began
    with, as far as that is possible.

    Raises JobFailed, OutOfMemory, DeviceFault, StoreError, ModelChanged, and what `means` raises.
    """
    request, device = setup.request, setup.device
    if began_with == "eager":
        by_choice = eager_by_choice(request, setup.parts, device=device, store=means.store)
        if by_choice is not None:
            return by_choice
        if means.paying is not None:
            means.paying.keep_in_eager(setup)
        step = EagerStep(request, device, fallback="the training began in eager and stays exact")
        return PreparedStep(step=step, key=program_key(setup.parts, Role.UPDATE), hit=Hit.MISS)
    paying = None if began else means.paying
    return prepare_stored_step(
        replace(request, only=began_with),
        setup.parts,
        device=device,
        store=means.store,
        on_miss=paying.answer(setup) if paying is not None else by_spec(means.on_miss),
        check_code=setup.check_code,
        report=means.report,
        waiting=means.waiting,
        around=partial(means.around, "the training step" + _texts(setup)),
    )


def prepare_steps(
    setup: Setup, means: Means, *, began_with: Sequence[Source | Literal["eager"] | None]
) -> list[PreparedStep]:
    """The best step for batches of each shape. Raises what `prepare_step` raises, with all of them closed."""
    made: list[PreparedStep] = []
    try:
        with keeping_compilers():
            for each, kind in zip_longest(setup.each, began_with[: len(setup.each)]):
                made.append(prepare_step(each, means, began_with=kind, began=len(made) < len(began_with)))
        if means.paying is not None:
            means.paying.settle(made)
    except BaseException:
        for prepared in made:
            prepared.step.close()
        raise
    return made


def as_one(prepared: Sequence[PreparedStep]) -> TrainingStep:
    """One step for batches of all shapes."""
    return prepared[0].step if len(prepared) == 1 else SeveralSteps([each.step for each in prepared])


def replay_validations(forward: Forward, setup: Setup, step: TrainingStep, means: Means) -> PreparedForward:
    """Capture the forward pass of a step's module, stored or built now; `failure` says why it stays in eager.

    Raises DeviceFault, and any error of `prepare_forward` that is not an EngineError.
    """
    request = setup.request
    layout = step.schedule.layout if step.schedule is not None and _replays(step) else "given"
    tolerance = step_tolerance(request, setup.device)
    parts = forward_parts(setup.parts, request.x, layout)
    on_miss = means.paying.validation(setup) if means.paying is not None else None
    prepared = forward.capture(
        request.x,
        lambda module: prepare_forward(
            module,
            request.x,
            parts,
            options=replace(request.options, layout="given", tolerance=tolerance),
            store=means.store,
            on_miss=on_miss or by_spec(means.on_miss, "for validations, "),
            check_code=setup.check_code,
            say=means.trying,
            waiting=means.waiting,
            around=partial(means.around, "the forward pass of validations" + _texts(setup)),
        ),
    )
    if isinstance(prepared, PreparedForward):
        return prepared
    return PreparedForward(key=schedule_key(parts), input=parts["input"], hit=Hit.MISS, failure=prepared)


def summary_of_all(setup: Setup, prepared: Sequence[PreparedStep], device: torch.device) -> dict[str, Any]:
    """What `show` prints of the schedules for batches of all shapes: that of the first one that is replayed, and a
    line for each bucket.
    """
    if not setup.names:
        return summary(prepared[0], device)
    found = summary(next((one for one in prepared if _replays(one.step)), prepared[0]), device)
    buckets = []
    for each, one in zip(setup.each, prepared, strict=True):
        schedule = one.step.schedule
        buckets.append(
            {
                "length": each.tokens,
                "batch": each.request.x.shape[0],
                "key": one.key,
                "hit": one.hit.value,
                "runs": "eager" if schedule is None else schedule.runs,
                "replay_us": None if schedule is None else schedule.replay_us,
                "eager_us": None if schedule is None else schedule.eager_us,
                "fallback": one.step.fallback,
            }
        )
    missed = next((one for one in prepared if one.hit is Hit.MISS), None)
    if missed is not None:
        found |= {"hit": missed.hit.value, "miss_reason": missed.miss_reason}
    fallback = next((one.step.fallback for one in prepared if one.step.fallback is not None), None)
    return found | {"fallback": fallback, "buckets": buckets}


def summary(prepared: PreparedStep, device: torch.device) -> dict[str, Any]:
    """What `show` prints of the step's schedule."""
    schedule = prepared.step.schedule
    return {
        "key": prepared.key,
        "hit": prepared.hit.value,
        "runs": "eager" if schedule is None else schedule.runs,
        "fallback": prepared.step.fallback,
        "eager_is_faster": schedule is not None and schedule.runs == "eager",
        "miss_reason": prepared.miss_reason,
        "device": devices.describe(device),
        **({} if schedule is None else schedule.summary()),
    }


def _replays(step: TrainingStep) -> bool:
    return step.schedule is not None and step.schedule.runs == "schedule"


def _texts(setup: Setup) -> str:
    """Which texts are meant, as the end of a sentence about a step; empty if there is one shape only."""
    return "" if setup.tokens is None else f" for texts of up to {setup.tokens} tokens"
