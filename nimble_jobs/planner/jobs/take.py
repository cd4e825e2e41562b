"""A stored schedule into a loaded model: captured, and checked against eager."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import CheckFailed
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.planner.forward.build import example_of, observe_calls
from nimble_jobs.planner.forward.restore import check_loaded, restore
from nimble_jobs.planner.jobs.loaded import Loaded, Residents
from nimble_jobs.planner.keys.request import tolerance_of
from nimble_jobs.planner.lookup.obtain import use_stored
from nimble_jobs.planner.lookup.outcomes import Miss, Refused, Taken
from nimble_jobs.planner.lookup.stored import Material, read_stored
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.store import Store

Report = Callable[..., None]


def take_stored(loaded: Loaded, store: Store, residents: Residents, report: Report) -> Taken[Loaded] | Miss | Refused:
    """Give a loaded model the schedule that is stored under its key. What proves unfit is quarantined.

    Raises OutOfMemory, DeviceFault, StoreError.
    """
    with collector_paused():
        found = read_stored(loaded.key, store)
    if not isinstance(found, Taken):
        return found
    material = found.value
    runs_eager = material.schedule.runs == "eager"
    if not runs_eager:
        report(phase="check")

    def make() -> Loaded:
        if runs_eager:
            loaded.schedule = material.schedule
            return loaded
        residents.make_room(loaded.bytes + material.schedule.peak_bytes)
        with collector_paused():
            _capture(loaded, material)
        return loaded

    return use_stored({loaded.key: material}, make, store, disagrees=_disagrees)


def _disagrees(error: CheckFailed) -> Refused:
    """The schedule passed its check when it was built, so its bytes or this device are in doubt. The next job builds it
    anew; this one runs in eager.
    """
    return Refused(
        reason=f"the stored schedule failed its check: {error}", fallback=f"the schedule is quarantined: {error}"
    )


def _capture(loaded: Loaded, material: Material) -> None:
    """Capture a stored schedule and check it against eager."""
    request, schedule = loaded.request, material.schedule
    example = {"x": example_of(request, loaded.module, loaded.device)}
    observed = observe_calls(loaded.module, example, loaded.device, keep_integers=False)

    def check(instance: Instance) -> None:
        check_loaded(
            instance,
            loaded.module,
            schedule,
            loaded.device,
            tolerance=tolerance_of(request),
            seed=secrets.randbits(32),
            below=numbers_for(loaded.module),
            observed=observed,
        )

    try:
        restored = restore(loaded.module, material, example, loaded.device, check, own=True)
    finally:
        observed.put_back()
    loaded.schedule, loaded.module, loaded.instances = schedule, restored.module, restored.instances
    loaded.observed = observed
