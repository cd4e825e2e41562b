"""Resident, stored, or built now: a model ready for a job."""

from __future__ import annotations

import time

import torch

from nimble_jobs.job import Hit
from nimble_jobs.models.packed import Packed
from nimble_jobs.planner.jobs.background import Builders
from nimble_jobs.planner.jobs.building import build_apart, build_new, build_quickly, check_code
from nimble_jobs.planner.jobs.loaded import Loaded, Report, Residents, Siblings, build_module, keep_resident
from nimble_jobs.planner.jobs.prepared import FirstRun, Prepared, Progress
from nimble_jobs.planner.jobs.take import move, take_stored
from nimble_jobs.planner.keys.request import Request, key_parts, resident_key, schedule_key
from nimble_jobs.planner.lookup.obtain import Waiting, by_spec, obtain
from nimble_jobs.planner.lookup.stored import Later, Miss, Obtained, Refused, Taken
from nimble_jobs.planner.module.carried import Carried
from nimble_jobs.store import Store


def prepare(
    request: Request,
    *,
    device: torch.device,
    store: Store,
    residents: Residents,
    report: Report = lambda **_: None,
    waiting: Waiting = lambda _: None,
    builders: Builders | None = None,
    siblings: Siblings | None = None,
) -> Prepared:
    """Make the model of a request ready on `device`.

    A schedule that cannot be had is not an error: the model then runs in eager and `loaded.fallback` says why. While
    another process builds the schedule, `waiting` is called again and again; what it raises comes through. With
    `builders`, and unless `schedule.progressive` is false, a miss does not wait: see `improve`. The weights of
    `siblings`, whose requests differ in their packing only, serve this model too. Raises
    ModelError for a model that cannot be built, ModelChanged for one whose code was edited meanwhile, OutOfMemory, and
    JobFailed if `schedule.on_miss` is `fail`.
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
    loaded = _made(key, request, device, siblings)
    check_code(request, parts)
    residents.make_room(loaded.bytes)
    load_s = time.perf_counter() - start
    progressive = builders if request.schedule.progressive is not False else None
    found = _give_schedule(loaded, parts, store, residents, report, waiting, progressive)
    hit = found.hit
    if found.fallback is not None:
        loaded.fallback = found.fallback
    begins_eager = hit is Hit.MISS and progressive is not None and loaded.undecided
    provisional = begins_eager or (hit is Hit.MISS and progressive is not None and loaded.ready)
    if loaded.instances and not provisional:
        loaded.carried = None
    elif siblings is None or not begins_eager:  # weights that are shared have not been called
        _begin(loaded)
    if loaded.unschedulable or (loaded.ready and not provisional):  # what this job alone wants binds no other one
        keep_resident(loaded, residents)
    return Prepared(
        loaded=loaded,
        hit=hit,
        load_s=load_s,
        build_s=time.perf_counter() - start - load_s,
        miss_reason=found.miss_reason,
        progress=Progress.EAGER if begins_eager else Progress.BUILDING if provisional else None,
        first_run=FirstRun(parts=parts) if begins_eager else None,
    )


def _made(key: str, request: Request, device: torch.device, siblings: Siblings | None) -> Loaded:
    """The model on the device, without a schedule."""
    module = build_module(request, device, siblings.first if siblings is not None else None)
    if siblings is None:
        return Loaded(key=key, request=request, device=device, module=module, carried=Carried(module))
    if siblings.first is None or siblings.carried is None:
        assert isinstance(module, Packed)
        siblings.first, siblings.carried = module, Carried(module)
    carried = siblings.carried
    loaded = Loaded(key=key, request=request, device=device, module=module, carried=carried, siblings=siblings)
    siblings.members.add(loaded)
    return loaded


def _begin(loaded: Loaded) -> None:
    """Make the module what it was before its first call, which may have been one that was tried in vain."""
    if not loaded.begin():
        loaded.module = build_module(loaded.request, loaded.device)
        loaded.carried = Carried(loaded.module)


def _still_serves(kept: Loaded, request: Request, store: Store) -> bool:
    """A resident serves while its schedule is stored and sound; one without a schedule, unless the job demands one."""
    if kept.unschedulable:
        return request.schedule.on_miss != "fail"
    return store.schedules.ready(kept.key)


def _give_schedule(
    loaded: Loaded,
    parts: dict[str, str],
    store: Store,
    residents: Residents,
    report: Report,
    waiting: Waiting,
    builders: Builders | None,
) -> Obtained[Loaded]:
    """Fill in schedule and instances. With `builders` a miss does not wait for a whole build."""
    asked = loaded.request.schedule
    answer = by_spec(asked.on_miss)

    def on_miss(miss: Miss) -> Miss | Refused | Later:
        wanted = answer(miss)
        if isinstance(wanted, Refused):
            return wanted
        if loaded.carried is not None:
            loaded.carried.weigh()  # a build calls the module
        if builders is None:
            return wanted
        if asked.progressive != "auto":
            report(phase="build")
            build_quickly(loaded)
            if loaded.ready:
                builders.start(loaded.key, loaded.request, loaded.device)
        return Later(reason=miss.reason)

    found = obtain(
        loaded.key,
        lambda: take_stored(loaded, store, residents, report, if_it_pays=asked.progressive == "auto"),
        lambda: (build_new if loaded.siblings is None else build_apart)(loaded, parts, store, report),
        store=store,
        on_miss=on_miss,
        check_code=lambda: check_code(loaded.request, parts),
        waiting=waiting,
    )
    if loaded.siblings is not None and found.value is loaded and loaded.undecided:  # it was built apart
        taken = take_stored(loaded, store, residents, report)
        if not isinstance(taken, Taken):
            loaded.fallback = f"what was built could not be loaded: {taken.reason}"
    return found


def _go_on(
    kept: Loaded,
    request: Request,
    parts: dict[str, str],
    start: float,
    store: Store,
    residents: Residents,
    report: Report,
) -> Prepared | None:
    """A model that an earlier job left on the device without a schedule, made ready for this job.

    It gets the schedule if one has been stored since; otherwise it runs as it did for that job. None if this job cannot
    use the model.
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
    if not isinstance(move(kept, store, residents, report), Taken):
        return None
    kept.provisional = False
    if kept.instances:
        kept.carried = None
    return Prepared(loaded=kept, hit=Hit.STORED, load_s=time.perf_counter() - start, build_s=0.0)
