"""The schedules of a fine-tuning without its job: whether they are stored, why not, and building them now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.collectives import rehearsing
from nimble_jobs.errors import OutOfMemory
from nimble_jobs.planner.jobs.ahead import WAITING, Ahead, Answer, Say, look_up_parts, reporter
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.keys.step import code_parts, forward_parts, program_parts, step_parts
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.planner.lookup.why import Why, why_of
from nimble_jobs.planner.step.prepare import PreparedStep
from nimble_jobs.planner.step.validation import PreparedForward
from nimble_jobs.spec import JobSpec, TrainSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads.training.step import setup
from nimble_jobs.workloads.training.step.losses import targets
from nimble_jobs.workloads.training.step.prepare import Means, prepare_step, replay_validations
from nimble_jobs.workloads.training.step.validation import Forward, replayable
from nimble_jobs.workloads.whole_numbers import naming_whole_numbers


def why(spec: JobSpec, *, store: Store) -> Why:
    """Hit or miss of the step's programs and of what its validations replay, and what differs for the first miss.

    Nothing is built.
    """
    keys, x = _asked(spec)
    answers = [why_of(parts, store=store) for parts in keys.values()]
    missed = next((answer for answer in answers if not answer.hit), None)
    if missed is not None or not _replays_validations(spec):
        return missed or answers[0]
    assert answers[0].schedule is not None
    validation = why_of(forward_parts(keys[Role.UPDATE], x, answers[0].schedule.layout), store=store)
    return answers[0] if validation.hit else replace(validation, reason=f"validation: {validation.reason}")


def explain(
    spec: JobSpec, *, store: Store, build: bool, allowed_python: tuple[Path, ...] = (), say: Say = lambda _: None
) -> dict[Role, Answer]:
    """The schedules of the step's programs; the one that updates the weights comes first.

    If one is missing and `build` is set, all are built and stored. Raises ModelError, DataError, OutOfMemory.
    """
    answers = {role: look_up_parts(parts, store=store) for role, parts in _asked(spec)[0].items()}
    if not build or all(answer.schedule is not None for answer in answers.values()):
        return answers
    prepared, _, _ = _prepare(spec, store, allowed_python, say)
    return built_now(answers, prepared)


def build(
    spec: JobSpec,
    *,
    store: Store,
    batch_sizes: Sequence[int] = (),
    allowed_python: tuple[Path, ...] = (),
    say: Say = lambda _: None,
) -> Iterator[Ahead]:
    """Build the schedules of a step, and of its validations if they are replayed, for one batch size after the other.

    Without `batch_sizes`, the spec's own. Counts as a use, hit or miss, as a job's would. Raises ModelError, DataError,
    OutOfMemory.
    """
    for size in batch_sizes or (spec.input.batch_size,):
        sized = spec.model_copy(update={"input": spec.input.model_copy(update={"batch_size": size})})
        prepared, validation, shape = _prepare(sized, store, allowed_python, say, validations=True)
        yield stored(prepared, shape)
        if validation is not None:
            yield Ahead.of(
                validation.schedule,
                key=validation.key,
                input=validation.input,
                hit=validation.hit,
                miss_reason=validation.miss_reason,
                fallback=None if validation.failure is None else f"validations: {validation.failure}",
            )


def programs(parts: Mapping[str, str], train: TrainSpec) -> dict[Role, dict[str, str]]:
    """The key parts of each program of a step, from those of the step; the one that updates the weights comes first."""
    roles = (Role.UPDATE, Role.ACCUMULATE) if train.accumulate > 1 else (Role.UPDATE,)
    return {role: program_parts(parts, role) for role in roles}


def built_now(answers: Mapping[Role, Answer], prepared: PreparedStep) -> dict[Role, Answer]:
    """The answers for a step's programs after a miss, once the step is built."""
    return {
        role: replace(
            answer,
            hit=prepared.hit,
            miss_reason=prepared.miss_reason,
            schedule=prepared.step.schedules.get(role),
            fallback=prepared.step.fallback,
            load_s=None,
        )
        for role, answer in answers.items()
    }


def stored(prepared: PreparedStep, shape: str) -> Ahead:
    """What is stored for a step. `shape` names its input with its shape; the build time is that of all its programs."""
    step = prepared.step
    return Ahead.of(
        step.schedule,
        key=prepared.key,
        input=shape,
        hit=prepared.hit,
        miss_reason=prepared.miss_reason,
        fallback=step.fallback,
        build_s=sum(each.build_s for each in step.schedules.values()) if step.schedule else None,
    )


def building(store: Store, say: Say) -> Means:
    """Means that build what is not stored, and say in words what they do. The model is loaded next."""
    report = reporter(say)
    report(phase="load")
    return Means(
        store=store,
        on_miss="build",
        report=report,
        trying=lambda candidate: say(f"validations: trying {candidate}"),
        waiting=lambda _: say(WAITING),
    )


def _asked(spec: JobSpec) -> tuple[dict[Role, dict[str, str]], torch.Tensor]:
    """The key parts of the step's programs, and an example of the step's input."""
    device, train = devices.resolve(spec.run.device), spec.train
    assert train is not None
    with (
        setup.cores_shared(spec, device),
        open_reader(spec.input, targets=targets(train.loss)) as reader,
        as_in_training(device),
    ):
        decodes.check(spec, reader, device)
        size = setup.batch_size_of(spec)
        x, y = setup.example(setup.first_batch(reader, size), min(size, reader.total), torch.device("cpu"))
        parts = step_parts(code_parts(spec.model, train), train, spec.schedule, x, y, device)
        parts |= setup.rank_parts(setup.ranks_of(spec))
    return programs(parts, train), x


def _replays_validations(spec: JobSpec) -> bool:
    assert spec.train is not None
    return spec.train.validation is not None and replayable(devices.resolve(spec.run.device))


def _prepare(
    spec: JobSpec, store: Store, allowed_python: tuple[Path, ...], say: Say, *, validations: bool = False
) -> tuple[PreparedStep, PreparedForward | None, str]:
    """Load or build the step and, with `validations`, what they replay, and close both; third, the step's input.

    Raises ModelError, DataError, OutOfMemory.
    """
    device, train = devices.resolve(spec.run.device), spec.train
    assert train is not None
    means, validation = building(store, say), None
    try:
        with (
            setup.cores_shared(spec, device),
            open_reader(spec.input, targets=targets(train.loss)) as reader,
            naming_whole_numbers(spec, reader),
            as_in_training(device),
        ):
            decodes.check(spec, reader, device)
            ready = setup.prepare(spec, reader, device, allowed_python)
            with rehearsing():  # a step of several ranks joins the others when it trains
                step = prepare_step(ready, means)
            with closing(step.step), closing(Forward.of(ready)) as forward:
                if validations and _replays_validations(spec):
                    validation = replay_validations(forward, ready, step.step, means)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e
    return step, validation, ready.parts["input"]
