"""Resident, stored, or built now; and in every case what the user should know about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from nimble_jobs.errors import (
    EngineError,
    ModelError,
    OutOfMemory,
)
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.job import Hit
from nimble_jobs.models import identity
from nimble_jobs.models.build import build
from nimble_jobs.models.embedding import WithEmbedding
from nimble_jobs.models.preprocessed import Preprocessed
from nimble_jobs.payback import Costs, Decision
from nimble_jobs.planner.forward.build import build_schedule, save_built
from nimble_jobs.planner.jobs.background import Builders
from nimble_jobs.planner.jobs.loaded import Loaded, Residents
from nimble_jobs.planner.jobs.quick import build_quickly, explain
from nimble_jobs.planner.jobs.take import Report, take_stored
from nimble_jobs.planner.keys.request import Request, key_parts, resident_key, schedule_key, tolerance_of
from nimble_jobs.planner.lookup.obtain import Waiting, check_unchanged, eager_instead, in_turn
from nimble_jobs.planner.module.carried import Carried
from nimble_jobs.store import Store


class Progress(StrEnum):
    """Where a job stands that began on what was quick to build."""

    EAGER = "eager"  # began in eager, and what is built is decided once its rate is known
    QUICK = "quick"  # moved to the quick candidate, and nothing better is being built
    BUILDING = "building"
    MOVED = "moved"  # to the better schedule
    STAYS = "stays"  # none came of the build, or none pays


@dataclass(kw_only=True)
class FirstRun:
    """What a job that began in eager has measured, what was decided on that, and which batches it moved at."""

    parts: Mapping[str, str]  # of the key
    began: tuple[int, float] | None = None  # records done and seconds run, after what is slow only once
    decision: Decision | None = None
    costs: Costs | None = None
    why: str = ""  # what was decided, in words
    moves: list[dict[str, Any]] = field(default_factory=list)
    asked_s: float = 0.0  # when the store was asked last for what others may have built
    wanted: bool = False  # the store knows that this job did without

    def summary(self) -> dict[str, Any]:
        """As part of the job's schedule."""
        decided = self.decision
        return {
            "why": self.why or None,
            "plan": decided.plan.value if decided is not None else None,
            "cost_s": decided.cost_s if decided is not None else None,
            "saving_s": decided.saving_s if decided is not None else None,
            "later": decided.later if decided is not None else True,
            "moves": list(self.moves),
        }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model that is ready to run, and how it came to be."""

    loaded: Loaded
    hit: Hit
    load_s: float  # from the request to the module on the device
    build_s: float  # recording, capturing, checking, measuring
    miss_reason: str | None = None
    progress: Progress | None = None  # of a progressive job that missed; until it moved, `loaded` is this job's alone
    stays_because: str | None = None  # why the better schedule could not be loaded, though it is stored
    first_run: FirstRun | None = None  # of a job that began in eager

    def summary(self) -> dict[str, Any]:
        """What `show` prints of the schedule."""
        schedule, loaded = self.loaded.schedule, self.loaded
        summary: dict[str, Any] = {
            "key": loaded.key,
            "hit": self.hit.value,
            "runs": "schedule" if loaded.instances else "eager",
            "fallback": loaded.fallback,
            "eager_is_faster": loaded.ready and not loaded.instances,
            "miss_reason": self.miss_reason,
            "progress": self.progress.value if self.progress is not None else None,
            "first_run": self.first_run.summary() if self.first_run is not None else None,
        }
        if schedule is not None:
            summary |= {
                "device": schedule.device,
                "tasks": schedule.facts.tasks,
                "kernels": schedule.kernels,
                "layout": schedule.layout,
                "streams": schedule.plan.streams,
                "in_flight": schedule.in_flight,
                "syncs": len(schedule.plan.syncs),
                "replay_us": schedule.replay_us,
                "eager_us": schedule.eager_us,
                "noise": schedule.noise,
                "error": schedule.error,
                "tolerance": tolerance_of(loaded.request),
                "peak_bytes": schedule.peak_bytes,
            }
        return summary


def prepare(
    request: Request,
    *,
    device: torch.device,
    store: Store,
    residents: Residents,
    report: Report = lambda **_: None,
    waiting: Waiting = lambda _: None,
    builders: Builders | None = None,
) -> Prepared:
    """Make the model of a request ready on `device`.

    A schedule that cannot be had is not an error: the model then runs in eager and `loaded.fallback` says why. While
    another process builds the schedule, `waiting` is called again and again; what it raises comes through. With
    `builders`, and unless `schedule.progressive` is false, a miss does not wait: see `improve`. Raises
    ModelError for a model that cannot be built, ModelChanged for one whose code was edited meanwhile, OutOfMemory, and
    JobFailed where `schedule.on_miss` is `fail`.
    """
    start = time.perf_counter()
    parts = key_parts(request, device)
    key = schedule_key(parts)
    kept: Loaded | None = residents.get(resident_key(key, request))
    if kept is not None and not kept.provisional and _still_serves(kept, request, store) and kept.begin():
        store.schedules.touch(key, Hit.RESIDENT, time.time())
        return Prepared(loaded=kept, hit=Hit.RESIDENT, load_s=time.perf_counter() - start, build_s=0.0)
    if kept is not None and kept.provisional and builders is not None:
        again = _go_on(kept, request, parts, start, store, residents, report)
        if again is not None:
            return again
    report(phase="load")
    module = build_module(request, device)
    _check_unchanged(request, parts)
    loaded = Loaded(key=key, request=request, device=device, module=module, carried=Carried(module))
    residents.make_room(loaded.bytes)
    load_s = time.perf_counter() - start
    progressive = builders if request.schedule.progressive is not False else None
    hit, reason = _give_schedule(loaded, parts, store, residents, report, waiting, progressive)
    begins_eager = hit is Hit.MISS and progressive is not None and loaded.undecided
    provisional = begins_eager or (hit is Hit.MISS and progressive is not None and loaded.ready)
    if loaded.instances and not provisional:
        loaded.carried = None
    elif not loaded.begin():  # what was tried in vain has called it
        loaded.module = build_module(request, device)
        loaded.carried = Carried(loaded.module)
    if hit is Hit.MISS:
        store.schedules.missed(reason or "", time.time())
    if loaded.unschedulable or (loaded.ready and not provisional):  # what this job alone wants binds no other one
        _keep(loaded, residents)
    return Prepared(
        loaded=loaded,
        hit=hit,
        load_s=load_s,
        build_s=time.perf_counter() - start - load_s,
        miss_reason=reason,
        progress=Progress.EAGER if begins_eager else Progress.BUILDING if provisional else None,
        first_run=FirstRun(parts=parts) if begins_eager else None,
    )


def _go_on(
    kept: Loaded,
    request: Request,
    parts: dict[str, str],
    start: float,
    store: Store,
    residents: Residents,
    report: Report,
) -> Prepared | None:
    """What an earlier job left that had no schedule: with the one that was stored since, or as that job ended; None
    where it cannot be used.
    """
    if request.schedule.progressive != "auto" or request.schedule.on_miss != "build" or not kept.begin():
        return None
    if not store.schedules.ready(kept.key):
        reason = "no schedule is stored under this key"
        store.schedules.missed(reason, time.time())
        return Prepared(
            loaded=kept,
            hit=Hit.MISS,
            load_s=time.perf_counter() - start,
            build_s=0.0,
            miss_reason=reason,
            progress=Progress.QUICK if kept.instances else Progress.EAGER,
            first_run=FirstRun(parts=parts),
        )
    if _move(kept, store, residents, report) is not None:
        return None
    kept.provisional = False
    if kept.instances:
        kept.carried = None
    return Prepared(loaded=kept, hit=Hit.STORED, load_s=time.perf_counter() - start, build_s=0.0)


def leave(prepared: Prepared, residents: Residents) -> None:
    """A job that did without a schedule has ended: its model stays for the next one, where it is as it was first, and
    is closed otherwise.
    """
    loaded = prepared.loaded
    if prepared.progress in (None, Progress.MOVED):
        return
    if prepared.first_run is None or not loaded.begin():
        loaded.close()
        return
    loaded.provisional = True
    _keep(loaded, residents)


def improve(
    prepared: Prepared, *, store: Store, residents: Residents, builders: Builders, report: Report = lambda **_: None
) -> Prepared:
    """Move a progressive job to its better schedule, once its build has ended; until then, the same as was given.

    To be called between two batches: what was captured is closed. Where the stored schedule cannot be used, what ran
    before is captured anew, and `stays_because` says why. Raises OutOfMemory where not even that fits, DeviceFault.
    """
    loaded = prepared.loaded
    if builders.running(loaded.key):  # what it has on the device would not leave room, though all be stored
        return prepared
    if not store.schedules.ready(loaded.key):
        return replace(prepared, progress=Progress.STAYS)
    start, first, in_eager = time.perf_counter(), loaded.observed, not loaded.instances
    reason = _move(loaded, store, residents, report)
    if reason is not None:
        loaded.release()
        loaded.fallback = None  # it is the better schedule's
        if not in_eager:
            build_quickly(loaded)
    elif prepared.first_run is not None and loaded.instances:
        loaded.carried = None
    if first is not None and loaded.observed is not None:  # the next job begins as this one began
        loaded.observed = replace(first, changing=first.changing | loaded.observed.changing)
    return replace(
        prepared,
        progress=Progress.MOVED if reason is None else Progress.STAYS,
        stays_because=reason,
        load_s=prepared.load_s + time.perf_counter() - start,
    )


def build_now(
    prepared: Prepared, *, store: Store, waiting: Waiting = lambda _: None, report: Report = lambda **_: None
) -> None:
    """Build and store the schedule of a job that runs in eager, between two batches: it stands still meanwhile. See
    `improve`, which then moves it. Raises ModelChanged, OutOfMemory, DeviceFault.
    """
    assert prepared.first_run is not None
    parts, request = dict(prepared.first_run.parts), prepared.loaded.request
    module = build_module(request, prepared.loaded.device)  # the job's own is not to be laid out otherwise
    spare = Loaded(key=prepared.loaded.key, request=request, device=prepared.loaded.device, module=module)
    in_turn(
        spare.key,
        "",
        store=store,
        waiting=waiting,
        take=lambda: store.schedules.ready(spare.key),
        build=lambda: _build_new(spare, parts, store, report),
    )
    spare.close()


def _move(loaded: Loaded, store: Store, residents: Residents, report: Report) -> str | None:
    """Close what runs and load what is stored: None, or the reason why that failed."""
    loaded.release()
    try:
        reason = take_stored(loaded, store, residents, report)
        if reason is None:
            _keep(loaded, residents)
    except OutOfMemory as e:
        return str(e)
    except torch.OutOfMemoryError as e:
        return f"not enough memory on {loaded.device}: {e}"
    return reason


def _keep(loaded: Loaded, residents: Residents) -> None:
    if loaded.instances:
        loaded.take_off()  # what it takes counts in the budget
        _ = loaded.arrivals
    residents.put(resident_key(loaded.key, loaded.request), loaded)


def _still_serves(kept: Loaded, request: Request, store: Store) -> bool:
    """A resident serves while its schedule is stored and sound; one without a schedule, unless the job demands one."""
    if kept.unschedulable:
        return request.schedule.on_miss != "fail"
    return store.schedules.ready(kept.key)


def build_module(request: Request, device: torch.device) -> nn.Module:
    """The request's module on the device. Raises ModelError, OutOfMemory."""
    try:
        with collector_paused():
            module = build(request.model, device=str(device), allowed_python=request.allowed_python)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} for the model's weights: {e}") from e
    if request.embedding:
        module = WithEmbedding(module)
    if request.preprocess is not None:
        module = Preprocessed(module, request.preprocess, request.model_dtype, device)
    return module


def _check_unchanged(request: Request, parts: dict[str, str]) -> None:
    """What ran must be what the key names: it was made before the code ran. Raises ModelChanged."""
    check_unchanged({n: v for n, v in parts.items() if n.startswith("model.")}, identity(request.model))


def _give_schedule(
    loaded: Loaded,
    parts: dict[str, str],
    store: Store,
    residents: Residents,
    report: Report,
    waiting: Waiting,
    builders: Builders | None,
) -> tuple[Hit, str | None]:
    """Fill in schedule and instance, or the reason for eager. Returns the hit, and for a miss its reason."""
    reason = take_stored(loaded, store, residents, report)
    if reason is None:
        return Hit.STORED, None
    if loaded.fallback is not None:
        return Hit.MISS, reason
    loaded.fallback = eager_instead(loaded.request.schedule.on_miss, reason)
    if loaded.fallback is not None:
        return Hit.MISS, reason
    if loaded.carried is not None:
        loaded.carried.weigh()  # a build calls the module
    if builders is not None and loaded.request.schedule.progressive == "auto":
        return Hit.MISS, reason
    if builders is not None:
        report(phase="build")
        build_quickly(loaded)
        if loaded.ready:
            builders.start(loaded.key, loaded.request, loaded.device)
        return Hit.MISS, reason
    return in_turn(
        loaded.key,
        reason,
        store=store,
        waiting=waiting,
        take=lambda: take_stored(loaded, store, residents, report) is None,
        build=lambda: _build_new(loaded, parts, store, report),
    )


def _build_new(loaded: Loaded, parts: dict[str, str], store: Store, report: Report) -> None:
    if loaded.fallback is not None:  # another process has built what cannot be used
        return
    report(phase="build")

    def told(candidate: str) -> None:
        report(phase="build", schedule={"trying": candidate})

    try:
        built = build_schedule(loaded.module, loaded.request, loaded.key, loaded.device, told=told)
    except EngineError as e:
        explain(loaded, e)
        return
    try:
        _check_unchanged(loaded.request, parts)  # recording may have imported more
    except ModelError:
        built.close()
        raise
    loaded.schedule = built.schedule
    save_built(built, parts, store)
    if built.failure is not None:
        loaded.fallback = f"the schedule is quarantined: {built.failure}"
        built.close()
    else:
        loaded.module, loaded.instances, loaded.observed = built.module, built.instances, built.observed
