"""Schedules of modules in the store. What was recorded names the module exactly, so its code need not be known."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.inputs import stand_out
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.verify import tolerance_for
from nimble_jobs.errors import CheckFailed, UsageError
from nimble_jobs.planner.forward.restore import Restored, check_loaded, restore
from nimble_jobs.planner.lookup.obtain import use_stored
from nimble_jobs.planner.lookup.stored import Miss, Refused, Taken, read_stored
from nimble_jobs.planner.module.limits import integers_below
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve


@contextlib.contextmanager
def opened(store: object) -> Iterator[Store | None]:
    """The store at a state folder, closed at the end; one that is open already stays open. None stays None.

    Raises SettingsError for a configuration that is not valid.
    """
    if store is None or isinstance(store, Store):
        yield store
    elif isinstance(store, str | Path):
        with open_store(resolve(str(store))) as found:
            found.settings.now()  # what cannot be read is said now, not at the end of a long build
            yield found
    else:
        raise UsageError(f"store: found {type(store).__name__}; expected the path of a state folder, or a Store")


def load(
    call: nn.Module,
    key: str,
    example: Mapping[str, torch.Tensor],
    device: torch.device,
    store: Store,
    observed: Observed,
) -> Taken[Restored] | Miss | Refused:
    """What the store has under a key, captured and checked. A schedule that proves unfit is quarantined.

    Raises CheckFailed for a schedule that disagrees with eager now, and is refused from now on; OutOfMemory.
    """
    found = read_stored(key, store)
    if not isinstance(found, Taken):
        return found
    material = found.value

    def check(instances: Sequence[Instance]) -> None:
        check_loaded(
            instances,
            call,
            material.schedule,
            device,
            tolerance=tolerance_for(call, next(iter(example.values()))),
            seed=secrets.randbits(32),
            below=integers_below(call),
            integers=stand_out(example),
            observed=observed,
            example=example,
        )

    def make() -> Restored:
        if material.schedule.runs == "eager":
            return Restored(schedule=material.schedule, module=call, instances=())
        return restore(call, material, example, device, check)

    def refuse(error: CheckFailed) -> Miss | Refused:
        store.schedules.refuse(key, str(error), time.time())
        raise error

    return use_stored({key: material}, make, store, disagrees=refuse)
