"""A forward pass over weights that a training moves, for its validations: as it is stored, or built now and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.job import Hit
from nimble_jobs.planner.forward.build import Built, build_best, observe_calls, save_built
from nimble_jobs.planner.forward.restore import check_loaded, restore
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.step import seed_of
from nimble_jobs.planner.lookup.obtain import Waiting, eager_instead, in_turn
from nimble_jobs.planner.lookup.stored import Material, read_stored
from nimble_jobs.planner.module.limits import integers_below
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
    on_miss: str,
    check_code: Callable[[], None] = lambda: None,
    told: Callable[[str], None] = lambda _: None,
    waiting: Waiting = lambda _: None,
) -> PreparedForward:
    """The schedule whose key has these parts, captured over the live weights of `module`, which is in evaluation mode.

    Weights stay where they lie. What is damaged, or fails its check, is quarantined and built again. On a miss
    `on_miss` decides, as for scoring. Before a new schedule is stored, `check_code` raises where the code is not what
    the key says. Raises JobFailed, EngineError, OutOfMemory, StoreError, and what `told` and `waiting` raise.
    """
    key = schedule_key(parts)
    found: list[tuple[Instance | None, Schedule | None, str | None]] = []
    reason = ""

    def take() -> bool:
        nonlocal reason
        stored = read_stored(key, store)
        if stored.refused is not None:
            found.append((None, None, stored.refused))
            return True
        if stored.material is None:
            reason = stored.reason or ""
            return False
        try:
            found.append((_restored(module, x, stored.material), stored.material.schedule, None))
        except (OutOfMemory, DeviceFault):
            raise
        except (CheckFailed, EngineError, ValueError) as e:
            reason = f"the stored schedule was not used: {e}"
            store.schedules.quarantine(key, reason, time.time(), digest=stored.material.digest)
            return False
        store.schedules.touch(key, Hit.STORED, time.time())
        return True

    def build() -> None:
        built = build_best(module, {"x": x}, key, options, x.device, keep_integers=True, told=told)
        found.append(_kept(built, parts, store, check_code))

    hit, miss_reason = Hit.STORED, None
    if not take():
        missed = reason
        fallback = eager_instead(on_miss, f"for validations, {missed}")
        if fallback is None:
            hit, miss_reason = in_turn(key, missed, store=store, waiting=waiting, take=take, build=build)
        else:
            hit, miss_reason = Hit.MISS, missed
            found.append((None, None, fallback))
        if hit is Hit.MISS:
            store.schedules.missed(missed, time.time())
    instance, schedule, failure = found[-1]
    return PreparedForward(
        key=key,
        input=parts["input"],
        instance=instance,
        schedule=schedule,
        hit=hit,
        miss_reason=miss_reason,
        failure=failure,
    )


def _restored(module: nn.Module, x: torch.Tensor, material: Material) -> Instance | None:
    """Captured and checked; None where eager is faster."""
    if material.schedule.runs == "eager":
        return None
    observed = observe_calls(module, {"x": x}, x.device)

    def check(instance: Instance) -> None:
        check_loaded(
            instance,
            module,
            material.schedule,
            x.device,
            tolerance=material.schedule.tolerance,
            seed=seed_of(material.schedule.key),  # the same in every attempt
            below=integers_below(module),
            integers={} if x.is_floating_point() else {"x": x},
            observed=observed,
        )

    try:
        (instance, *_) = restore(module, material, {"x": x}, x.device, check).instances
    finally:
        observed.put_back()
    return instance


def _kept(
    built: Built, parts: Mapping[str, str], store: Store, check_code: Callable[[], None]
) -> tuple[Instance | None, Schedule | None, str | None]:
    """Store what was built, refused where it failed its check."""
    try:
        check_code()  # recording may have imported more
        save_built(built, parts, store)
    except BaseException:
        built.close()
        raise
    if built.failure is not None:
        built.close()
        return None, None, built.failure
    return next(iter(built.instances), None), built.schedule, None
