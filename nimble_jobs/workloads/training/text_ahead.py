"""The schedules of a training on texts without its job. Its buckets follow from all of its texts, so these are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import DataError, OutOfMemory
from nimble_jobs.planner.jobs.ahead import Ahead, Answer, Say, look_up_parts
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.planner.lookup.why import Why, why_of
from nimble_jobs.planner.step.prepare import PreparedStep
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads.training.ahead import building, built_now, programs, stored
from nimble_jobs.workloads.training.session import number_as_head, open_held_out
from nimble_jobs.workloads.training.step.losses import targets
from nimble_jobs.workloads.training.step.prepare import as_one, prepare_steps
from nimble_jobs.workloads.training.step.setup import Setup
from nimble_jobs.workloads.training.step.texts import TrainTexts, prepare


def why(spec: JobSpec, *, store: Store, allowed_python: tuple[Path, ...] = ()) -> Why:
    """Hit or miss of the buckets' steps, and what differs for the first miss. Nothing is built."""
    with _set_up(spec, allowed_python) as ready:
        answers = [why_of(parts, store=store) for each in ready.each for parts in _programs(each).values()]
    return next((answer for answer in answers if not answer.hit), answers[0])


def explain(
    spec: JobSpec, *, store: Store, build: bool, allowed_python: tuple[Path, ...], say: Say
) -> tuple[dict[Role, Answer], list[dict[str, Any]]]:
    """The programs of the bucket with the most tokens in a batch, and a line for each bucket. If one is missing and
    `build` is set, all are built and stored. Raises ModelError, DataError, OutOfMemory.
    """
    with _set_up(spec, allowed_python) as ready:
        found = [
            {role: look_up_parts(parts, store=store) for role, parts in _programs(each).items()} for each in ready.each
        ]
        if build and any(answer.schedule is None for one in found for answer in one.values()):
            found = [built_now(one, step) for one, step in zip(found, _steps(ready, store, say), strict=True)]
        buckets = [_line(each, one[Role.UPDATE]) for each, one in zip(ready.each, found, strict=True)]
    return found[0], sorted(buckets, key=lambda bucket: bucket["length"])


def build(spec: JobSpec, *, store: Store, allowed_python: tuple[Path, ...], say: Say) -> Iterator[Ahead]:
    """Build the step of each bucket. Counts as a use, hit or miss, as a job's would. Raises what `explain` raises."""
    with _set_up(spec, allowed_python) as ready:
        for each, prepared in zip(ready.each, _steps(ready, store, say), strict=True):
            yield stored(prepared, each.parts["input"])


@contextmanager
def _set_up(spec: JobSpec, allowed_python: tuple[Path, ...]) -> Iterator[Setup]:
    """The classifier with a request for each bucket's step. Raises ModelError, DataError, OutOfMemory."""
    device, train = devices.resolve(spec.run.device), spec.train
    assert train is not None
    try:
        with ExitStack() as open_:
            reader = open_.enter_context(open_reader(spec.input, targets=targets(train.loss)))
            if not reader.has_labels:
                raise DataError("input.fields.label: fine-tuning needs labels; the input has none")
            number_as_head(spec, reader)
            held_out = None
            if train.validation is not None:
                held_out = open_.enter_context(open_held_out(spec, train.validation.source, reader))
            open_.enter_context(as_in_training(device))
            yield prepare(spec, TrainTexts.read(spec, reader, held_out), device, allowed_python)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e


def _programs(ready: Setup) -> dict[Role, dict[str, str]]:
    """The key parts of each program of a step."""
    assert ready.spec.train is not None
    return programs(ready.parts, ready.spec.train)


def _steps(ready: Setup, store: Store, say: Say) -> list[PreparedStep]:
    """The steps of all buckets, stored or built now; they are closed, and what they hold of their schedules stays."""
    steps = prepare_steps(ready, building(store, say), began_with=())
    with closing(as_one(steps)):
        return steps


def _line(each: Setup, answer: Answer) -> dict[str, Any]:
    """A bucket in `explain`."""
    schedule = answer.schedule
    return {
        "length": each.tokens,
        "batch": each.request.x.shape[0],
        "share": None,
        "key": answer.key,
        "hit": answer.hit.value,
        "fallback": answer.fallback,
        "runs": None if schedule is None else schedule.runs,
        "replay_us": None if schedule is None else schedule.replay_us,
        "eager_us": None if schedule is None else schedule.eager_us,
    }
