"""The schedules of a fine-tuning's step, without its job: are they stored, and if not, why; build them now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import OutOfMemory
from nimble_jobs.job import Hit
from nimble_jobs.planner.ahead import WAITING, Ahead, Told, reporter
from nimble_jobs.planner.step_key import code_parts, program_parts, step_parts
from nimble_jobs.planner.step_prepare import prepare_stored_step
from nimble_jobs.planner.switches import as_in_training
from nimble_jobs.planner.why import Why, why_of
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads.training import setup
from nimble_jobs.workloads.training.losses import targets


def why(spec: JobSpec, *, store: Store) -> Why:
    """Hit or miss of the step's programs, and what differs; of several misses the first. Nothing is built."""
    device, train = devices.resolve(spec.run.device), spec.train
    assert train is not None
    with open_reader(spec.input, targets=targets(train.loss)) as reader, as_in_training(device):
        x, y = setup.example(reader, spec.input.batch_size, torch.device("cpu"))
        parts = step_parts(code_parts(spec.model, train), train, spec.schedule, x, y, device)
    programs = (True, False) if train.accumulate > 1 else (True,)
    found = [why_of(program_parts(parts, update=update), store=store) for update in programs]
    return next((answer for answer in found if not answer.hit), found[0])


def build(
    spec: JobSpec,
    *,
    store: Store,
    batch_sizes: Sequence[int] = (),
    allowed_python: tuple[Path, ...] = (),
    told: Told = lambda _: None,
) -> Iterator[Ahead]:
    """Build the schedules of a step of each batch size (none: the spec's own), one after the other.

    Counts as a use, hit or miss, as a job's would. Raises ModelError, DataError, OutOfMemory.
    """
    for size in batch_sizes or (spec.input.batch_size,):
        sized = spec.input.model_copy(update={"batch_size": size})
        yield _built(spec.model_copy(update={"input": sized}), store, allowed_python, told)


def _built(spec: JobSpec, store: Store, allowed_python: tuple[Path, ...], told: Told) -> Ahead:
    device, train = devices.resolve(spec.run.device), spec.train
    assert train is not None
    report = reporter(told)
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
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e
    step, schedule = prepared.step, prepared.step.schedule
    step.close()
    return Ahead(
        key=prepared.key,
        input=ready.parts["input"],
        hit=prepared.hit is not Hit.MISS,
        miss_reason=prepared.miss_reason,
        build_s=sum(each.build_s for each in step.schedules.values()) if schedule else None,
        replay_us=schedule.replay_us if schedule else None,
        eager_us=schedule.eager_us if schedule else None,
        device=schedule.device if schedule else None,
        fallback=step.fallback,
    )
