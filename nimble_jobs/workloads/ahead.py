"""The schedules that a spec asks for, without running its job: whether they are stored, why not, building them now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.models import permission
from nimble_jobs.planner import Request
from nimble_jobs.planner.jobs.ahead import Ahead, Told, build_ahead
from nimble_jobs.planner.jobs.replay import Replay, replay
from nimble_jobs.planner.lookup.why import Why
from nimble_jobs.planner.lookup.why import why as planner_why
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import ScheduleEntry, Store
from nimble_jobs.workloads.score import request_of
from nimble_jobs.workloads.training import ahead as training


def asked(
    spec: JobSpec, allowed_python: tuple[Path, ...] = (), memory_bytes: int | None = None
) -> tuple[Request, torch.device]:
    """What a scoring job will ask of the planner.

    `memory_bytes` is the `--gpu-memory` of the worker that will run the job, if you set one.
    """
    with open_reader(spec.input) as reader:
        device = devices.resolve(spec.run.device)
        return request_of(spec, reader, device, allowed_python, memory_bytes), device


def why(spec: JobSpec, *, store: Store, memory_bytes: int | None = None) -> Why:
    """Hit or miss, and what differs. Nothing is built."""
    if spec.kind == "finetune":
        return training.why(spec, store=store)
    request, device = asked(spec, memory_bytes=memory_bytes)
    return planner_why(request, device=device, store=store)


def build(
    spec: JobSpec,
    *,
    store: Store,
    batch_sizes: Sequence[int] = (),
    allowed_python: tuple[Path, ...] = (),
    memory_bytes: int | None = None,
    told: Told = lambda _: None,
) -> Iterator[Ahead]:
    """Build the schedule for one batch size after the other; without `batch_sizes`, for the spec's own.

    `told` hears what is going on.
    """
    permission.check(spec.model, allowed_python)
    if spec.kind == "finetune":
        yield from training.build(spec, store=store, batch_sizes=batch_sizes, allowed_python=allowed_python, told=told)
        return
    request, device = asked(spec, allowed_python, memory_bytes)
    for size in batch_sizes or (request.batch_size,):
        yield build_ahead(replace(request, batch_size=size), device=device, store=store, told=told)


def replay_stored(
    entries: Sequence[ScheduleEntry], *, store: Store, allowed_python: tuple[Path, ...] = ()
) -> Iterator[tuple[ScheduleEntry, Replay]]:
    """Replay schedules against eager if this machine has their device.

    Files of models are looked for in the current folder and in the folders of `allowed_python`.
    """
    for entry in entries:
        device = devices.resolve("auto" if entry.parts.get("device") == "cuda" else "cpu")
        folders = [Path.cwd(), *allowed_python]
        yield entry, replay(entry, device=device, store=store, folders=folders, allowed_python=allowed_python)
