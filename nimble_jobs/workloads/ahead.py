"""The schedules that a spec asks for, without running its job: whether they are stored, why not, building them now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.private.compilers import keeping_compilers
from nimble_jobs.errors import UsageError
from nimble_jobs.models import permission
from nimble_jobs.models.pictures import with_model_transform
from nimble_jobs.planner import Request
from nimble_jobs.planner.jobs.ahead import Ahead, Say, build_ahead
from nimble_jobs.planner.jobs.replay import Replay, replay
from nimble_jobs.planner.lookup.why import Why
from nimble_jobs.planner.lookup.why import why as planner_why
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec.formats import TEXTS
from nimble_jobs.store import ScheduleEntry, Store
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads.request import request_of
from nimble_jobs.workloads.text.job import TextPlan, plan_of
from nimble_jobs.workloads.text.setup import ColumnOfText, set_up
from nimble_jobs.workloads.training import ahead as training
from nimble_jobs.workloads.training import text_ahead as text_training


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a scoring job will ask of the planner: one schedule, or for texts one for each bucket."""

    requests: tuple[Request, ...]
    device: torch.device
    texts: TextPlan | None  # None if the records are no texts

    @property
    def main(self) -> int:
        """The one that most records are for."""
        return 0 if self.texts is None else int(np.argmax(self.texts.shares))

    @property
    def in_turn(self) -> list[int]:
        """Which to build first, and so on."""
        return [0] if self.texts is None else self.texts.in_turn


def asked(
    spec: JobSpec, allowed_python: tuple[Path, ...] = (), memory_bytes: int | None = None
) -> tuple[Request, torch.device]:
    """What a scoring job will ask of the planner, if its records are no texts. See `asked_each`."""
    spec = with_model_transform(spec)
    column = ColumnOfText(spec)
    with open_reader(spec.input, tokens=column) as reader:
        device = devices.resolve(spec.run.device)
        return request_of(spec, reader, device, allowed_python, memory_bytes, column=column), device


def asked_each(
    spec: JobSpec, *, store: Store, allowed_python: tuple[Path, ...] = (), memory_bytes: int | None = None
) -> Asked:
    """What a scoring job will ask of the planner.

    `memory_bytes` is the `--gpu-memory` of the worker that will run the job, if you set one. Raises UsageError for a
    device that cannot decode as the spec asks.
    """
    spec = with_model_transform(spec)
    column = ColumnOfText(spec)
    with open_reader(spec.input, tokens=column) as reader:
        device = devices.resolve(spec.run.device)
        decodes.check(spec, reader, device)
        request = request_of(spec, reader, device, allowed_python, memory_bytes, column=column)
        if spec.input.format not in TEXTS:
            return Asked(requests=(request,), device=device, texts=None)
        plan = plan_of(reader, set_up(spec), request, fields=spec.output.fields, device=device, store=store)
        return Asked(requests=plan.requests, device=device, texts=plan)


def why(spec: JobSpec, *, store: Store, memory_bytes: int | None = None) -> Why:
    """Hit or miss, and what differs. Nothing is built. Of the buckets of texts, the first miss answers."""
    spec = with_model_transform(spec)
    if spec.kind == "finetune":
        return text_training.why(spec, store=store) if spec.input.format == "text" else training.why(spec, store=store)
    wanted = asked_each(spec, store=store, memory_bytes=memory_bytes)
    answers = [planner_why(request, device=wanted.device, store=store) for request in wanted.requests]
    return next((answer for answer in answers if not answer.hit), answers[wanted.main])


def build(
    spec: JobSpec,
    *,
    store: Store,
    batch_sizes: Sequence[int] = (),
    allowed_python: tuple[Path, ...] = (),
    memory_bytes: int | None = None,
    say: Say = lambda _: None,
) -> Iterator[Ahead]:
    """Build the schedule for one batch size after the other; without `batch_sizes`, for the spec's own. For texts,
    build those of all buckets, that with most batches first.

    `say` hears what is going on. Raises UsageError for batch sizes of texts.
    """
    permission.check(spec.model, allowed_python)
    spec = with_model_transform(spec)
    if batch_sizes and spec.input.format in TEXTS:
        raise UsageError(
            "--batch-size: batches of texts are counted in tokens; set input.text.tokens_per_batch instead"
        )
    if spec.kind == "finetune" and spec.input.format == "text":
        yield from text_training.build(spec, store=store, allowed_python=allowed_python, say=say)
        return
    if spec.kind == "finetune":
        yield from training.build(spec, store=store, batch_sizes=batch_sizes, allowed_python=allowed_python, say=say)
        return
    wanted = asked_each(spec, store=store, allowed_python=allowed_python, memory_bytes=memory_bytes)
    requests = [replace(wanted.requests[0], batch_size=size) for size in batch_sizes]
    requests = requests or [wanted.requests[number] for number in wanted.in_turn]
    with keeping_compilers():
        for number, request in enumerate(requests):
            before = f"bucket {number + 1} of {len(requests)}: " if wanted.texts is not None else ""
            yield build_ahead(request, device=wanted.device, store=store, say=_prefixed(say, before))


def _prefixed(say: Say, before: str) -> Say:
    return lambda doing: say(before + doing)


def replay_stored(
    entries: Sequence[ScheduleEntry], *, store: Store, allowed_python: tuple[Path, ...] = ()
) -> Iterator[tuple[ScheduleEntry, Replay]]:
    """Replay schedules against eager if this machine has their device.

    Files of models are looked for in the current folder and in the folders of `allowed_python`.
    """
    for entry in entries:
        kind = entry.parts.get("device")
        device = next((one for one in devices.present() if one.type == kind), torch.device("cpu"))
        folders = [Path.cwd(), *allowed_python]
        yield entry, replay(entry, device=device, store=store, folders=folders, allowed_python=allowed_python)
