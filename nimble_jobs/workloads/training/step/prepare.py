"""The schedules of a training: taken from the store or built now, and what the job says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.inductor import keeping_compilers
from nimble_jobs.job import Hit
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.keys.step import forward_parts, program_key
from nimble_jobs.planner.lookup.obtain import Waiting
from nimble_jobs.planner.search.contest import faster_in_eager
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step.build import EagerStep, TrainingStep, step_tolerance
from nimble_jobs.planner.step.prepare import PreparedStep, eager_by_choice, prepare_stored_step
from nimble_jobs.planner.step.several import SeveralSteps
from nimble_jobs.planner.step.validation import PreparedForward, prepare_forward
from nimble_jobs.store import Store
from nimble_jobs.workloads.context import Event
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


def prepare_step(setup: Setup, means: Means, *, began_with: Source | Literal["eager"] | None = None) -> PreparedStep:
    """The best step, stored or built now; for an interrupted training, the kind of step that it began with.

    Raises JobFailed, OutOfMemory, DeviceFault, StoreError, ModelChanged, and what `means` raises.
    """
    request, device = setup.request, setup.device
    if began_with == "eager":
        by_choice = eager_by_choice(request, setup.parts, device=device, store=means.store)
        if by_choice is not None:
            return by_choice
        step = EagerStep(request, device, fallback="the training began in eager and stays exact")
        return PreparedStep(step=step, key=program_key(setup.parts, Role.UPDATE), hit=Hit.MISS)
    return prepare_stored_step(
        replace(request, only=began_with),
        setup.parts,
        device=device,
        store=means.store,
        on_miss=means.on_miss,
        check_code=setup.check_code,
        report=means.report,
        waiting=means.waiting,
    )


def prepare_steps(
    setup: Setup, means: Means, *, began_with: Sequence[Source | Literal["eager"] | None]
) -> list[PreparedStep]:
    """The best step for batches of each shape. Raises what `prepare_step` raises, with all of them closed."""
    kinds = [*began_with, *[None] * len(setup.each)]
    made: list[PreparedStep] = []
    try:
        with keeping_compilers():
            for each, kind in zip(setup.each, kinds, strict=False):
                made.append(prepare_step(each, means, began_with=kind))
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
    replays = step.schedule is not None and step.schedule.runs == "schedule"
    layout = step.schedule.layout if step.schedule is not None and replays else "given"
    tolerance = step_tolerance(request, setup.device)
    parts = forward_parts(setup.parts, request.x, layout)
    prepared = forward.capture(
        request.x,
        lambda module: prepare_forward(
            module,
            request.x,
            parts,
            options=replace(request.options, layout="given", tolerance=tolerance),
            store=means.store,
            on_miss=means.on_miss,
            check_code=setup.check_code,
            told=means.trying,
            waiting=means.waiting,
        ),
    )
    if isinstance(prepared, PreparedForward):
        return prepared
    return PreparedForward(key=schedule_key(parts), input=parts["input"], hit=Hit.MISS, failure=prepared)


def tell_step(prepared: PreparedStep, event: Event, *, tokens: int | None, load_s: float, build_s: float) -> None:
    """Record on the job where its schedule came from, or why it has none. `tokens`: of the bucket; None: no texts."""
    key, fallback = prepared.key, prepared.step.fallback
    bucket = f"up to {tokens} tokens: " if tokens is not None else ""
    if fallback is not None:
        event("fallback", f"{bucket}runs in eager: {fallback}", {"key": key})
        return
    took = f"loading took {load_s:.3f} s" + (f", building {build_s:.3f} s" if prepared.hit is Hit.MISS else "")
    said = f"{bucket}{_hit(prepared)}: {took}{faster_in_eager(prepared.step.schedule)}"
    event("schedule", said, {"key": key, "hit": prepared.hit.value})


def tell_validation(prepared: PreparedForward, event: Event) -> None:
    """Record on the job where the schedule of its validations came from, or why there is none."""
    data = {"key": prepared.key, "hit": prepared.hit.value}
    if prepared.failure is not None:
        event("fallback", f"validation runs in eager: {prepared.failure}", {"key": prepared.key})
    elif prepared.instance is None:
        event("schedule", "validation: eager is faster here", data)
    else:
        event("schedule", f"validation: {_hit(prepared)}", data)


def summary_of_all(setup: Setup, prepared: Sequence[PreparedStep], device: torch.device) -> dict[str, Any]:
    """What `show` prints of the schedules for batches of all shapes: the first one's, and a line for each bucket."""
    found = summary(prepared[0], device)
    if not setup.names:
        return found
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


def _hit(prepared: PreparedStep | PreparedForward) -> str:
    reason = f" ({prepared.miss_reason})" if prepared.miss_reason else ""
    return f"{prepared.hit.value} {prepared.key[:12]}{reason}"
