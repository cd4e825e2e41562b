"""A training step for a job: as it is stored, or built now and stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from nimble_jobs import graph
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import Recording
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.job import Hit
from nimble_jobs.planner.forward.restore import recording_of, source_of
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.keys.step import check_seed, program_key
from nimble_jobs.planner.lookup.obtain import BuildResult, OnMiss, Waiting, obtain, touch, use_stored
from nimble_jobs.planner.lookup.stored import Material, Miss, Refused, Taken, read_stored
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step.build import CapturedStep, Parts, Report, build_step, step_tolerance
from nimble_jobs.planner.step.eager import EagerStep, TrainingStep
from nimble_jobs.planner.step.live import Capturable, LiveStep
from nimble_jobs.planner.step.request import StepRequest
from nimble_jobs.store import Store

_MEANT = {Role.UPDATE: "", Role.ACCUMULATE: "for batches without an update, "}


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A training step that is ready to run, and how it came to be."""

    step: TrainingStep
    key: str
    hit: Hit
    miss_reason: str | None = None


def prepare_stored_step(
    request: StepRequest,
    parts: Parts,
    *,
    device: torch.device,
    store: Store,
    on_miss: OnMiss,
    check_code: Callable[[], None],
    report: Report = lambda **_: None,
    waiting: Waiting = lambda _: None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> PreparedStep:
    """The step whose key has these parts, from the store, or built and stored now.

    With `request.only` nothing but that source will do: the same bits, if the stored schedule is the same. What is
    damaged, or fails its check, is quarantined and built again. Before a new schedule is stored, `check_code` raises
    if the code is not what the key says. On a miss `on_miss` decides. A build runs inside `around`. Raises OutOfMemory,
    DeviceFault, StoreError, and what the functions given raise.
    """
    key = program_key(parts, Role.UPDATE)

    def build() -> BuildResult[TrainingStep]:
        with around():
            return build_step(request, device=device, parts=parts, report=report)

    found = obtain(
        key,
        lambda: _take(request, parts, device, store, report),
        build,
        store=store,
        on_miss=on_miss,
        check_code=check_code,
        waiting=waiting,
    )
    step = found.value or EagerStep(request, device, fallback=found.fallback)
    return PreparedStep(step=step, key=key, hit=found.hit, miss_reason=found.miss_reason)


def eager_by_choice(request: StepRequest, parts: Parts, *, device: torch.device, store: Store) -> PreparedStep | None:
    """The step in eager if the store says that this is faster than a schedule; None otherwise."""
    keys = _keys(request, parts)
    materials: dict[Role, Material] = {}
    for role, key in keys.items():
        found = read_stored(key, store)
        if not isinstance(found, Taken) or found.value.schedule.runs != "eager":
            return None
        materials[role] = found.value
    touch(dict.fromkeys(keys.values()), store)
    return PreparedStep(step=_eager(request, materials, device), key=keys[Role.UPDATE], hit=Hit.STORED)


def _keys(request: StepRequest, parts: Parts) -> dict[Role, str]:
    return {role: program_key(parts, role) for role in request.programs}


def _take(
    request: StepRequest, parts: Parts, device: torch.device, store: Store, report: Report
) -> Taken[TrainingStep] | Miss | Refused:
    """Load what is stored. What proves unfit is quarantined. Raises OutOfMemory, DeviceFault, StoreError."""
    keys = _keys(request, parts)
    materials: dict[Role, Material] = {}
    for role, key in keys.items():
        found = read_stored(key, store)
        if not isinstance(found, Taken):
            return replace(found, reason=f"{_MEANT[role]}{found.reason}")
        materials[role] = found.value
    sources = {source_of(material.schedule) for material in materials.values()}
    if len(sources) > 1:
        return Miss(reason="the stored schedules of the step come from two different builds")
    (source,) = sources
    stays_eager = any(material.schedule.runs == "eager" for material in materials.values())
    if request.only is not None and (source != request.only or stays_eager):
        other = f"the stored schedule has {source.name}"
        why = other if source != request.only else "eager was measured to be faster since"
        return Miss(reason=f"the training began with {request.only.name}; {why}", spares=True)
    report(phase="check")

    def make() -> TrainingStep:
        if stays_eager:
            return _eager(request, materials, device)
        return _loaded(request, source, materials, device, seed=check_seed(parts))

    return use_stored({key: materials[role] for role, key in keys.items()}, make, store)


def _eager(request: StepRequest, materials: Mapping[Role, Material], device: torch.device) -> EagerStep:
    """The step as it is, which was measured to be faster than what is stored."""
    step = EagerStep(request, device)
    step.instead_of({role: material.schedule for role, material in materials.items()})
    return step


def _loaded(
    request: StepRequest, source: Source, materials: Mapping[Role, Material], device: torch.device, *, seed: int
) -> CapturedStep:
    """Capture stored programs over the live state, and check them against eager once.

    Nothing is searched, and nothing compiled unless a kernel cannot do without its compiler. Whatever is raised, the
    module is as it was: CheckFailed, EngineError, OutOfMemory, ValueError.
    """
    schedules = {role: material.schedule for role, material in materials.items()}
    for schedule in schedules.values():
        graph.check_plan(schedule.program, schedule.plan)
    live = LiveStep(request, EagerStep(request, device), device, tolerance=step_tolerance(request, device))
    instances: dict[Role, Instance] = {}
    with restoring_state(live.eager.arithmetic.objective, device), torch.inference_mode(False):
        try:
            live.refuse_what_replays_leave_out()
            live.use(source.layout)
            programs = {role: _program(live, source, role, material) for role, material in materials.items()}
            instances = live.capture(programs)
            live.check(instances, seed=seed)
            devices.clear_workspaces(device)  # of the check's calls in eager
        except BaseException:
            for instance in instances.values():
                instance.close()
            live.use("given")
            raise
    return CapturedStep(live, instances, schedules, programs)


def _program(live: LiveStep, source: Source, role: Role, material: Material) -> Capturable:
    schedule = material.schedule

    def record() -> Recording:
        return live.record(source, live.objective(source), role, like=schedule.program)

    memory = MemoryPlan(offsets=schedule.offsets, peak_bytes=schedule.arena_bytes)
    return recording_of(material, record), schedule.plan, memory
