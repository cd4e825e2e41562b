"""A stored schedule into a loaded model: captured, and checked against eager."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.job import Hit
from nimble_jobs.planner.forward.build import example_of, observe_calls
from nimble_jobs.planner.forward.restore import check_loaded, restore
from nimble_jobs.planner.jobs.loaded import Loaded, Residents
from nimble_jobs.planner.keys.request import tolerance_of
from nimble_jobs.planner.lookup.stored import Material, read_stored
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.store import Store

Report = Callable[..., None]


def take_stored(loaded: Loaded, store: Store, residents: Residents, report: Report) -> str | None:
    """Load what is stored under the key: None, or the reason why it cannot be used. Sets `fallback` where there is no
    point in building it now. What proves unfit is quarantined. Raises OutOfMemory, DeviceFault, StoreError.
    """
    with collector_paused():
        found = read_stored(loaded.key, store)
    if found.refused is not None:  # it failed its check before; building it again would fail again
        loaded.fallback = found.refused
    if found.material is None:
        return found.reason
    if found.material.schedule.runs == "eager":
        loaded.schedule = found.material.schedule
        store.schedules.touch(loaded.key, Hit.STORED, time.time())
        return None
    report(phase="check")
    try:
        residents.make_room(loaded.bytes + found.material.schedule.peak_bytes)
        with collector_paused():
            _load_stored(loaded, found.material)
    except (OutOfMemory, DeviceFault):
        raise
    except CheckFailed as e:
        # it passed when it was built: with these weights, or this device, it is the next job's to build anew
        reason = f"failed its check when it was loaded: {e}"
        loaded.fallback = f"the schedule is quarantined: {e}"
        answer = f"the stored schedule failed its check: {e}"
    except (EngineError, ValueError) as e:
        reason = answer = f"the stored schedule was not used: {e}"
    else:
        store.schedules.touch(loaded.key, Hit.STORED, time.time())
        return None
    store.schedules.quarantine(loaded.key, reason, time.time(), digest=found.material.digest)
    return answer


def _load_stored(loaded: Loaded, material: Material) -> None:
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
