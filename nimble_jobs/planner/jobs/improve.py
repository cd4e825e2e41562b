"""A job that began without its schedule: it moves to the schedule once that is stored, and leaves its model to the next
job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from nimble_jobs.planner.jobs.background import Builders
from nimble_jobs.planner.jobs.building import build_new, build_quickly, check_code
from nimble_jobs.planner.jobs.loaded import Loaded, Report, Residents, build_module, keep_resident
from nimble_jobs.planner.jobs.prepared import Prepared, Progress
from nimble_jobs.planner.jobs.take import move
from nimble_jobs.planner.lookup.obtain import Waiting, obtain
from nimble_jobs.planner.lookup.stored import Miss, Taken
from nimble_jobs.store import Store


def leave(prepared: Sequence[Prepared], residents: Residents) -> None:
    """A job has ended. Models that did without a schedule stay for the next job if they are as they were first, and are
    closed otherwise.
    """
    begun: dict[int, bool] = {}  # what several models share is put back once
    for one in prepared:
        loaded = one.loaded
        if one.progress in (None, Progress.MOVED):
            continue
        if one.first_run is None or not _begun(loaded, begun):
            loaded.close()
            continue
        loaded.provisional = True
        keep_resident(loaded, residents)


def _begun(loaded: Loaded, begun: dict[int, bool]) -> bool:
    if loaded.instances or loaded.carried is None:
        return loaded.begin()
    known = id(loaded.carried)
    if known not in begun:
        begun[known] = loaded.begin()
    return begun[known]


def improve(
    prepared: Prepared, *, store: Store, residents: Residents, builders: Builders, report: Report = lambda **_: None
) -> Prepared:
    """Move a progressive job to its better schedule, once its build has ended; until then, the same as was given.

    To be called between two batches: what was captured is closed. Where the stored schedule cannot be used, what ran
    before is captured anew, and `stays_because` says why. Raises OutOfMemory if not even that fits, DeviceFault.
    """
    loaded = prepared.loaded
    if builders.running(loaded.key):  # what it has on the device would not leave room, though all be stored
        return prepared
    if not store.schedules.ready(loaded.key):
        return replace(prepared, progress=Progress.STAYS)
    start, first, in_eager = time.perf_counter(), loaded.observed, not loaded.instances
    found = move(loaded, store, residents, report)
    moved = isinstance(found, Taken)
    if not moved:
        loaded.release()
        if not in_eager:
            build_quickly(loaded)
    elif prepared.first_run is not None and loaded.instances:
        loaded.carried = None
    if first is not None and loaded.observed is not None:  # the next job begins as this one began
        loaded.observed = replace(first, changing=first.changing | loaded.observed.changing)
    return replace(
        prepared,
        progress=Progress.MOVED if moved else Progress.STAYS,
        stays_because=None if isinstance(found, Taken) else found.reason,
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
    obtain(
        spare.key,
        lambda: Taken(value=spare) if store.schedules.ready(spare.key) else Miss(reason="", counts=False),
        lambda: build_new(spare, parts, store, report),
        store=store,
        check_code=lambda: check_code(request, parts),
        waiting=waiting,
    )
    spare.close()
