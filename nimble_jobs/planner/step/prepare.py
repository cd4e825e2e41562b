"""A training step for a job: as it is stored, or built now and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from nimble_jobs import graph
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.private import clear_workspaces
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.job import Hit
from nimble_jobs.planner.forward.restore import recording_of, source_of
from nimble_jobs.planner.keys.step import check_seed, program_key
from nimble_jobs.planner.lookup.obtain import Waiting, eager_instead, in_turn
from nimble_jobs.planner.lookup.stored import Material, keep, read_stored
from nimble_jobs.planner.module.restoring import no_traces
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step.build import BuiltStep, CapturedStep, Parts, Report, build_step, step_tolerance
from nimble_jobs.planner.step.eager import EagerStep, TrainingStep
from nimble_jobs.planner.step.live import LiveStep
from nimble_jobs.planner.step.request import StepRequest
from nimble_jobs.store import Store

_MEANT = {True: "", False: "for batches without an update, "}


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A training step that is ready to run, and how it came to be."""

    step: TrainingStep
    key: str
    hit: Hit
    miss_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A stored step, or the reason why there is none."""

    step: TrainingStep | None = None
    reason: str | None = None
    stays: bool = False  # what is stored is sound, but not what this training needs


def prepare_stored_step(
    request: StepRequest,
    parts: Parts,
    *,
    device: torch.device,
    store: Store,
    on_miss: str,
    check_code: Callable[[], None],
    report: Report = lambda **_: None,
    waiting: Waiting = lambda _: None,
) -> PreparedStep:
    """The step whose key has these parts, from the store, or built and stored now.

    With `request.only` nothing but that source will do: the same bits, where the stored schedule is the same. What is
    damaged, or fails its check, is quarantined and built again. Before a new schedule is stored, `check_code` raises
    where the code is not what the key says. On a miss `on_miss` decides, as for scoring. Raises JobFailed, OutOfMemory,
    DeviceFault, StoreError, and what `waiting` raises.
    """
    key = program_key(parts, update=True)
    taken = _take(request, parts, device, store, report)
    if taken.step is not None:
        return PreparedStep(step=taken.step, key=key, hit=Hit.STORED)
    reason = taken.reason or ""
    found: list[TrainingStep] = []
    stays = taken.stays
    fallback = eager_instead(on_miss, reason)
    if fallback is not None:
        store.schedules.missed(reason, time.time())
        return PreparedStep(
            step=EagerStep(request, device, fallback=fallback), key=key, hit=Hit.MISS, miss_reason=reason
        )

    def take() -> bool:
        nonlocal stays  # another process may have stored since
        again = _take(request, parts, device, store, report)
        stays = again.stays
        if again.step is not None:
            found.append(again.step)
        return again.step is not None

    def build() -> None:
        built = build_step(request, device=device, parts=parts, report=report)
        found.append(built.step)
        _keep(built, store, check_code, stays=stays)

    hit, miss_reason = in_turn(key, reason, store=store, waiting=waiting, take=take, build=build)
    if hit is Hit.MISS:
        store.schedules.missed(reason, time.time())
    return PreparedStep(step=found[-1], key=key, hit=hit, miss_reason=miss_reason)


def eager_by_choice(request: StepRequest, parts: Parts, *, device: torch.device, store: Store) -> PreparedStep | None:
    """The step as it is, where the store says that it is faster than a schedule; None where it does not."""
    keys = {update: program_key(parts, update=update) for update in request.programs}
    found = {update: read_stored(key, store).material for update, key in keys.items()}
    materials = {update: material for update, material in found.items() if material is not None}
    if len(materials) < len(keys) or any(material.schedule.runs != "eager" for material in materials.values()):
        return None
    for key in keys.values():
        store.schedules.touch(key, Hit.STORED, time.time())
    return PreparedStep(step=_eager(request, materials, device), key=keys[True], hit=Hit.STORED)


def _keep(built: BuiltStep, store: Store, check_code: Callable[[], None], *, stays: bool) -> None:
    """Store what was built, unless a sound schedule is stored that serves others."""
    try:
        check_code()  # recording may have imported more
        if built.storables and not stays:
            keep(built.storables, store)
    except BaseException:
        built.step.close()
        raise


def _take(request: StepRequest, parts: Parts, device: torch.device, store: Store, report: Report) -> _Taken:
    """Load what is stored. What proves unfit is quarantined. Raises OutOfMemory, DeviceFault, StoreError."""
    keys = {update: program_key(parts, update=update) for update in request.programs}
    materials: dict[bool, Material] = {}
    for update, key in keys.items():
        found = read_stored(key, store)
        if found.material is None:
            return _Taken(reason=f"{_MEANT[update]}{found.reason}")
        materials[update] = found.material
    sources = {source_of(material.schedule) for material in materials.values()}
    if len(sources) > 1:
        return _Taken(reason="the stored schedules of the step are of two builds")
    (source,) = sources
    if request.only is not None and source != request.only:
        return _Taken(
            reason=f"the training began with {request.only.name}; the stored schedule has {source.name}", stays=True
        )
    stays_eager = any(material.schedule.runs == "eager" for material in materials.values())
    if stays_eager and request.only is not None:
        why = f"the training began with {request.only.name}; eager was measured to be faster since"
        return _Taken(reason=why, stays=True)
    report(phase="check")
    step: TrainingStep
    try:
        if stays_eager:
            step = _eager(request, materials, device)
        else:
            step = _loaded(request, source, materials, device, seed=check_seed(parts))
    except (OutOfMemory, DeviceFault):
        raise
    except (CheckFailed, EngineError, ValueError) as e:
        reason = f"the stored schedule was not used: {e}"
    else:
        for key in keys.values():
            store.schedules.touch(key, Hit.STORED, time.time())
        return _Taken(step=step)
    for update, key in keys.items():
        store.schedules.quarantine(key, reason, time.time(), digest=materials[update].digest)
    return _Taken(reason=reason)


def _eager(request: StepRequest, materials: Mapping[bool, Material], device: torch.device) -> EagerStep:
    """The step as it is, which was measured to be faster than what is stored."""
    step = EagerStep(request, device)
    step.instead_of({update: material.schedule for update, material in materials.items()})
    return step


def _loaded(
    request: StepRequest, source: Source, materials: Mapping[bool, Material], device: torch.device, *, seed: int
) -> CapturedStep:
    """Capture stored programs over the live state, and check them against eager once.

    Nothing is searched, and nothing compiled unless a kernel cannot do without its compiler. Whatever is raised, the
    module is as it was: CheckFailed, EngineError, OutOfMemory, ValueError.
    """
    schedules = {update: material.schedule for update, material in materials.items()}
    for schedule in schedules.values():
        graph.check_plan(schedule.program, schedule.plan)
    live = LiveStep(request, EagerStep(request, device), device, tolerance=step_tolerance(request, device))
    instances: dict[bool, Instance] = {}
    with no_traces(live.eager.arithmetic.objective, device), torch.inference_mode(False):
        try:
            live.refuse_what_replays_leave_out()
            live.use(source.layout)
            recordings = {}
            for update, material in materials.items():
                recordings[update] = recording_of(
                    material,
                    lambda update=update, like=material.schedule.program: live.record(  # type: ignore[misc]
                        source, live.objective(source), update=update, like=like
                    ),
                )
            plans = {update: schedule.plan for update, schedule in schedules.items()}
            memories = {
                update: MemoryPlan(offsets=schedule.offsets, peak_bytes=schedule.arena_bytes)
                for update, schedule in schedules.items()
            }
            instances = live.capture(recordings, plans, memories)
            live.check(instances, seed=seed)
            if device.type == "cuda":
                clear_workspaces()  # of the check's calls in eager
        except BaseException:
            for instance in instances.values():
                instance.close()
            live.use("given")
            raise
    return CapturedStep(live, instances, schedules)
