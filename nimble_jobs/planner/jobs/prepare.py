"""Makes a model ready for a job, with a schedule that is resident, stored, or built now."""

from __future__ import annotations

import logging
import time

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.first_calls import loading_operators
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.job import Hit
from nimble_jobs.models.build import DTYPES
from nimble_jobs.models.packed import Packed
from nimble_jobs.planner.jobs.background import Builders
from nimble_jobs.planner.jobs.building import build_apart, build_new, build_quickly, check_code
from nimble_jobs.planner.jobs.loaded import Loaded, Report, Residents, Siblings, build_module, keep_resident
from nimble_jobs.planner.jobs.origin import noted
from nimble_jobs.planner.jobs.prepared import FirstRun, Prepared, Progress
from nimble_jobs.planner.jobs.take import move, take_stored
from nimble_jobs.planner.keys.request import Request, key_parts, resident_key, schedule_key
from nimble_jobs.planner.lookup.obtain import Waiting, by_spec, obtain
from nimble_jobs.planner.lookup.stored import Later, Miss, Obtained, Refused, Taken
from nimble_jobs.planner.module.carried import Carried
from nimble_jobs.store import Store

log = logging.getLogger(__name__)


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
    if siblings is not None and siblings.facts is None:
        siblings.facts = devices.facts(device)
    parts = key_parts(request, device, siblings.facts if siblings is not None else None)
    key = schedule_key(parts)
    kept = _kept(resident_key(key, request), residents)
    if kept is not None and not kept.provisional and _still_serves(kept, request, store) and kept.put_back():
        store.schedules.touch(key, Hit.RESIDENT, time.time())
        return Prepared(loaded=kept, hit=Hit.RESIDENT, load_s=time.perf_counter() - start, build_s=0.0)
    if kept is not None and kept.provisional and builders is not None:
        again = _continue_with(kept, request, parts, start, store, residents, report)
        if again is not None:
            return again
    report(phase="load")
    loaded = _without_schedule(key, request, device, siblings)
    check_code(request, parts)
    residents.make_room(loaded.bytes)
    load_s = time.perf_counter() - start
    progressive = builders if request.schedule.progressive is not False else None
    found = _give_schedule(loaded, parts, store, residents, report, waiting, progressive)
    if found.fallback is not None:
        loaded.fallback = found.fallback
    progress = None
    if found.hit is Hit.MISS and progressive is not None:
        progress = Progress.EAGER if loaded.undecided else Progress.BUILDING if loaded.ready else None
    if loaded.instances and progress is None:
        loaded.carried = None
    elif siblings is None or progress is not Progress.EAGER:  # siblings that begin in eager were not called yet
        _reset_module(loaded)
    if loaded.unschedulable or (loaded.ready and progress is None):  # not if only this job's spec wants eager
        keep_resident(loaded, residents)
    return Prepared(
        loaded=loaded,
        hit=found.hit,
        load_s=load_s,
        build_s=time.perf_counter() - start - load_s,
        miss_reason=found.miss_reason,
        progress=progress,
        first_run=FirstRun(parts=parts) if progress is Progress.EAGER else None,
    )


def _kept(key: str, residents: Residents) -> Loaded | None:
    """What an earlier job left on the device, unless a file has changed that its model was built from."""
    kept: Loaded | None = residents.get(key)
    if kept is None:
        return None
    if (path := kept.origin.files.changed()) is not None:
        log.info("the model is built anew: %s has changed", path)
        residents.drop(key)
        return None
    kept.origin.set_again()
    return kept


@collector_paused()
def _without_schedule(key: str, request: Request, device: torch.device, siblings: Siblings | None) -> Loaded:
    """The request's model on the device, which has no schedule yet."""
    pictures = request.packing is None and len(request.input_shape) == 4
    operators = loading_operators(device, DTYPES[request.model.dtype], pictures=pictures)
    with operators, noted(request.model) as origin:
        module = build_module(request, device, siblings.first if siblings is not None else None)
    shared = siblings.carried if siblings is not None else None
    carried = shared or Carried(module)
    if siblings is not None and shared is None:
        assert isinstance(module, Packed)
        siblings.first, siblings.carried, siblings.origin = module, carried, origin
    loaded = Loaded(
        key=key,
        request=request,
        device=device,
        module=module,
        origin=siblings.origin if siblings is not None else origin,
        carried=carried,
        uncalled=carried.held if shared is None else None,
        siblings=siblings,
    )
    if siblings is not None:
        siblings.members.add(loaded)
    return loaded


def _reset_module(loaded: Loaded) -> None:
    """Undo what calls did to the module, such as those of a build that failed; build it anew if that cannot be done."""
    if not loaded.put_back():
        loaded.module = build_module(loaded.request, loaded.device)
        loaded.carried = Carried(loaded.module)


def _still_serves(kept: Loaded, request: Request, store: Store) -> bool:
    """Whether a resident model may serve this job: its schedule is still stored and sound or, if it can have none, the
    job does not insist on one.
    """
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
    """Give a loaded model its stored schedule, or build one. With `builders`, a miss waits for no search."""
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


def _continue_with(
    kept: Loaded,
    request: Request,
    parts: dict[str, str],
    start: float,
    store: Store,
    residents: Residents,
    report: Report,
) -> Prepared | None:
    """Make ready a model that an earlier job left on the device without a schedule. None if this job cannot use it.

    It gets the schedule if one was stored meanwhile; otherwise it runs as it did for the earlier job.
    """
    if request.schedule.progressive != "auto" or request.schedule.on_miss != "build" or not kept.put_back():
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
