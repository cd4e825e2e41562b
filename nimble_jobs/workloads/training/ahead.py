"""The schedules of a fine-tuning's step, without its job: are they stored, and if not, why; build them now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import OutOfMemory
from nimble_jobs.planner.jobs.ahead import WAITING, Ahead, Answer, Told, look_up_parts, reporter
from nimble_jobs.planner.keys.step import code_parts, forward_parts, program_parts, step_parts
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.planner.lookup.why import Why, why_of
from nimble_jobs.planner.step.prepare import PreparedStep, prepare_stored_step
from nimble_jobs.planner.step.validation import PreparedForward
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads.training import setup
from nimble_jobs.workloads.training.forward import REPLAYED_ON, Forward, have_replayed
from nimble_jobs.workloads.training.losses import targets


def why(spec: JobSpec, *, store: Store) -> Why:
    """Hit or miss of the step's programs, and then of what its validations replay, and what differs; of several misses
    the first. Nothing is built.
    """
    keys, x = _asked(spec)
    found = [why_of(parts, store=store) for parts in keys.values()]
    missed = next((answer for answer in found if not answer.hit), None)
    if missed is not None or not _replays_validations(spec):
        return missed or found[0]
    assert found[0].schedule is not None
    validation = why_of(forward_parts(keys[True], x, found[0].schedule.layout), store=store)
    return found[0] if validation.hit else replace(validation, reason=f"validation: {validation.reason}")


def explain(
    spec: JobSpec, *, store: Store, build: bool, allowed_python: tuple[Path, ...] = (), told: Told = lambda _: None
) -> dict[bool, Answer]:
    """The schedules of the step's programs, by whether they update the weights; those that do come first.

    On a miss of one, all are built and stored if `build`. Raises ModelError, DataError, OutOfMemory.
    """
    found = {update: look_up_parts(parts, store=store) for update, parts in _asked(spec)[0].items()}
    if not build or all(answer.schedule is not None for answer in found.values()):
        return found
    prepared, _, _ = _prepared(spec, store, allowed_python, told)
    return {
        update: replace(
            answer,
            hit=prepared.hit,
            miss_reason=prepared.miss_reason,
            schedule=prepared.step.schedules.get(update),
            fallback=prepared.step.fallback,
            load_s=None,
        )
        for update, answer in found.items()
    }


def _asked(spec: JobSpec) -> tuple[dict[bool, dict[str, str]], torch.Tensor]:
    """The parts of the keys of the step's programs, by whether they update the weights, and an example of its input."""
    device, train = devices.resolve(spec.run.device), spec.train
    assert train is not None
    with open_reader(spec.input, targets=targets(train.loss)) as reader, as_in_training(device):
        x, y = setup.example(
            setup.first_batch(reader, spec.input.batch_size),
            min(spec.input.batch_size, reader.total),
            torch.device("cpu"),
        )
        parts = step_parts(code_parts(spec.model, train), train, spec.schedule, x, y, device)
    programs = (True, False) if train.accumulate > 1 else (True,)
    return {update: program_parts(parts, update=update) for update in programs}, x


def _replays_validations(spec: JobSpec) -> bool:
    assert spec.train is not None
    return spec.train.validation is not None and devices.resolve(spec.run.device).type in REPLAYED_ON


def build(
    spec: JobSpec,
    *,
    store: Store,
    batch_sizes: Sequence[int] = (),
    allowed_python: tuple[Path, ...] = (),
    told: Told = lambda _: None,
) -> Iterator[Ahead]:
    """Build the schedules of a step of each batch size (none: the spec's own), and of its validations where they are
    replayed, one after the other.

    Counts as a use, hit or miss, as a job's would. Raises ModelError, DataError, OutOfMemory.
    """
    for size in batch_sizes or (spec.input.batch_size,):
        sized = spec.input.model_copy(update={"batch_size": size})
        prepared, validation, shape = _prepared(
            spec.model_copy(update={"input": sized}), store, allowed_python, told, validations=True
        )
        yield _of_step(prepared, shape)
        if validation is not None:
            yield _of_validation(validation)


def _of_step(prepared: PreparedStep, shape: str) -> Ahead:
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


def _of_validation(found: PreparedForward) -> Ahead:
    return Ahead.of(
        found.schedule,
        key=found.key,
        input=found.input,
        hit=found.hit,
        miss_reason=found.miss_reason,
        fallback=None if found.failure is None else f"validations: {found.failure}",
    )


def _prepared(
    spec: JobSpec, store: Store, allowed_python: tuple[Path, ...], told: Told, *, validations: bool = False
) -> tuple[PreparedStep, PreparedForward | None, str]:
    """The step, from the store or built now and closed again, with `validations` also what they replay, and the step's
    input with its shape.
    """
    device, train = devices.resolve(spec.run.device), spec.train
    assert train is not None
    report, validation = reporter(told), None
    report(phase="load")
    try:
        with open_reader(spec.input, targets=targets(train.loss)) as reader, as_in_training(device):
            ready = setup.prepare(spec, reader, device, allowed_python)
            prepared = prepare_stored_step(
                ready.request,
                ready.parts,
                device=device,
                store=store,
                on_miss="build",
                check_code=lambda: ready.check_code(spec),
                report=report,
                waiting=lambda _: told(WAITING),
            )
            with closing(prepared.step), closing(Forward(ready.module, spec.model.dtype)) as forward:
                if validations and _replays_validations(spec):
                    validation = have_replayed(
                        forward,
                        ready,
                        prepared.step,
                        on_miss="build",
                        store=store,
                        check_code=lambda: ready.check_code(spec),
                        told=lambda candidate: told(f"validations: trying {candidate}"),
                        waiting=lambda _: told(WAITING),
                    )
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e
    return prepared, validation, ready.parts["input"]
