"""A forward pass over weights that a training moves, for its validations: as it is stored, or built now and stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.job import Hit
from nimble_jobs.models.packed import packed_in
from nimble_jobs.planner.forward.build import Built, build_best, build_result
from nimble_jobs.planner.forward.calls import observe_calls
from nimble_jobs.planner.forward.restore import Restored, check_loaded, restore
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.step import seed_of
from nimble_jobs.planner.lookup.obtain import BuildResult, OnMiss, Waiting, obtain, use_stored
from nimble_jobs.planner.lookup.stored import Material, Miss, Refused, Taken, read_stored
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import Store


@dataclass(frozen=True, kw_only=True)
class PreparedForward:
    """A forward pass that is ready to run, or the reason why there is none."""

    key: str
    input: str  # with its shape
    hit: Hit
    instance: Instance | None = None
    schedule: Schedule | None = None
    miss_reason: str | None = None
    failure: str | None = None


def prepare_forward(
    module: nn.Module,
    x: torch.Tensor,
    parts: Mapping[str, str],
    *,
    options: BuildOptions,
    store: Store,
    on_miss: OnMiss,
    check_code: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
    waiting: Waiting = lambda _: None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> PreparedForward:
    """The schedule whose key has these parts, captured over the live weights of `module`, which is in evaluation mode.

    Weights stay where they lie. What is damaged, or fails its check, is quarantined and built again. On a miss
    `on_miss` decides. Before a new schedule is stored, `check_code` raises if the code is not what the key says. A
    build runs inside `around`. Raises EngineError, OutOfMemory, StoreError, and what the functions given raise.
    """
    key, keep_integers = schedule_key(parts), packed_in(module) is None  # bytes of rows in another order say nothing

    def take() -> Taken[Built | Restored] | Miss | Refused:
        stored = read_stored(key, store)
        if not isinstance(stored, Taken):
            return stored
        return use_stored({key: stored.value}, lambda: _restored(module, x, stored.value, keep_integers), store)

    def build() -> BuildResult[Built | Restored]:
        with around():
            built = build_best(module, {"x": x}, key, options, x.device, keep_integers=keep_integers, say=say)
        return build_result(built, parts, built)

    found = obtain(key, take, build, store=store, on_miss=on_miss, check_code=check_code, waiting=waiting)
    ready = found.value
    return PreparedForward(
        key=key,
        input=parts["input"],
        instance=next(iter(ready.instances), None) if ready is not None else None,
        schedule=ready.schedule if ready is not None else None,
        hit=found.hit,
        miss_reason=found.miss_reason,
        failure=found.fallback,
    )


def _restored(module: nn.Module, x: torch.Tensor, material: Material, keep_integers: bool) -> Restored:
    """The stored schedule, captured and checked; without an instance if eager is faster."""
    if material.schedule.runs == "eager":
        return Restored(schedule=material.schedule, module=module, instances=())
    observed = observe_calls(module, {"x": x}, x.device, keep_integers=keep_integers)

    def check(instances: Sequence[Instance]) -> None:
        check_loaded(
            instances,
            module,
            material.schedule,
            x.device,
            tolerance=material.schedule.tolerance,
            seed=seed_of(material.schedule.key),  # the same in every attempt
            below=numbers_for(module),
            integers={"x": x} if keep_integers and not x.is_floating_point() else {},
            observed=observed,
        )

    try:
        return restore(module, material, {"x": x}, x.device, check)
    finally:
        observed.put_back()
