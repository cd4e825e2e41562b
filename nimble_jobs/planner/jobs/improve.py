"""For jobs that begin without their schedule: move to it once it is stored, and leave the model to the next job."""

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
    """End a job. Its models that ran without a schedule are kept for the next job if they can be put back to what they
    were before it, and closed otherwise.
    """
    done: dict[int, bool] = {}  # siblings share what they carry, which is put back once
    with residents.several():
        for one in prepared:
            loaded = one.loaded
            if one.progress in (None, Progress.MOVED):
                continue
            if one.first_run is None or not _put_back_once(loaded, done):
                loaded.close()
                continue
            loaded.provisional = True
            keep_resident(loaded, residents)


def _put_back_once(loaded: Loaded, done: dict[int, bool]) -> bool:
    if loaded.instances or loaded.carried is None:
        return loaded.put_back()
    known = id(loaded.carried)
    if known not in done:
        done[known] = loaded.put_back()
    return done[known]


def improve(
    prepared: Prepared, *, store: Store, residents: Residents, builders: Builders, report: Report = lambda **_: None
) -> Prepared:
    """Move a progressive job to its better schedule once the build has ended; until then, return what was given.

    Call it between two batches, because it closes what was captured. If the stored schedule cannot be used, what ran
    before is captured again, and `stays_because` says why. Raises OutOfMemory if not even that fits, DeviceFault.
    """
    loaded = prepared.loaded
    if builders.running(loaded.key):  # even if it has stored all, its device memory is not free yet
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
    """Build and store the schedule of a job that runs in eager, between two of its batches. `improve` then moves the
    job to it. Raises ModelChanged, OutOfMemory, DeviceFault.
    """
    assert prepared.first_run is not None
    parts, request = dict(prepared.first_run.parts), prepared.loaded.request
    module = build_module(request, prepared.loaded.device)  # a build may change the layout of weights
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
