"""The one way to a schedule, for jobs, training steps, validations and `Nimble`.

Load it; or wait for the process that builds it, and load it then; or build it and keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, JobFailed, ModelChanged, OutOfMemory
from nimble_jobs.job import Hit
from nimble_jobs.kernels.choices import Choices, using
from nimble_jobs.planner.lookup.stored import Later, Material, Miss, Obtained, Refused, Storable, Taken, keep
from nimble_jobs.store import Store, Wait

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Waiting = Callable[[Wait], None]
OnMiss = Callable[[Miss], Miss | Refused | Later]  # a Miss is to be built

BUILD_WAIT_S = 600.0  # how long a job waits for another process that builds the schedule it needs


@dataclass(frozen=True, kw_only=True)
class BuildResult(Generic[T_co]):
    """What a build made, and what the store is to keep of it."""

    value: T_co
    storables: tuple[Storable, ...]  # empty if the build ended without a schedule
    close: Callable[[], None]
    failure: str | None = None  # why the schedule must not be used: it disagrees with eager


def build_it(miss: Miss) -> Miss | Refused:
    """The answer to a miss that always builds."""
    return miss


def by_spec(on_miss: str, meaning: str = "") -> Callable[[Miss], Miss | Refused]:
    """The answer to a miss that `schedule.on_miss` gives. `meaning` says which schedule is missing, if it is not the
    job's own. The answer raises JobFailed if the spec says `fail`.
    """

    def answer(miss: Miss) -> Miss | Refused:
        said = f"schedule.on_miss is {on_miss}, and there is no stored schedule: {meaning}{miss.reason}"
        match on_miss:
            case "fail":
                raise JobFailed(f"{said}; to build it, run: nimble-jobs cache build SPEC")
            case "eager":
                return Refused(reason=miss.reason, fallback=said)
        return miss

    return answer


def obtain(
    key: str,
    load: Callable[[], Taken[T] | Miss | Refused],
    build: Callable[[], BuildResult[T] | Refused],
    *,
    store: Store,
    on_miss: OnMiss = build_it,
    check_code: Callable[[], None] = lambda: None,
    waiting: Waiting = lambda _: None,
) -> Obtained[T]:
    """Obtain what runs the schedule of a key: `load` takes it from the store, or `build` makes it.

    On a miss, `on_miss` decides whether to build. Only one process builds a key. Another one waits for it for up to
    BUILD_WAIT_S, calls `waiting` repeatedly meanwhile, and then loads what was stored. Before a new schedule is kept,
    `check_code` raises if the code is not what the key says. Raises what the four functions raise, and StoreError.
    """
    found: Taken[T] | Miss | Refused | Later = load()
    if isinstance(found, Miss):
        found = on_miss(found)
    if isinstance(found, Miss):
        first = found
        with store.builds.turn(key, limit_s=BUILD_WAIT_S, waiting=waiting) as alone:
            found = load()
            if isinstance(found, Miss):
                made = _stored(_built(build, store), found, store, check_code)
                reason = first.reason
                if not alone:
                    reason += f"; another process was still building it after {BUILD_WAIT_S:.0f} s"
                return _missed(reason, made, store, counts=first.counts)
    if isinstance(found, Taken):
        return Obtained(hit=Hit.STORED, value=found.value)
    return _missed(found.reason, found, store)


def _built(build: Callable[[], BuildResult[T] | Refused], store: Store) -> BuildResult[T] | Refused:
    """What `build` makes with the task times that earlier builds measured. Those that it measures are stored."""
    with using(Choices(store.task_times.read())) as choices:
        built = build()
    parts = built.storables[0].parts if isinstance(built, BuildResult) and built.storables else {}
    try:
        store.task_times.save(
            choices.measured,
            time.time(),
            model=parts.get("model.source", ""),
            used=choices.used,
            doubted=choices.doubted,
        )
    except BaseException:
        if isinstance(built, BuildResult):
            built.close()
        raise
    return built


def _stored(
    built: BuildResult[T] | Refused, miss: Miss, store: Store, check_code: Callable[[], None]
) -> BuildResult[T] | Refused:
    """Store what was built; one that failed its check is stored as refused, so that nobody builds it again."""
    if isinstance(built, Refused):
        return built
    try:
        check_code()  # recording may have imported more
        if built.storables and not miss.spares:
            keep(built.storables, store)
    except BaseException:
        built.close()
        raise
    if built.failure is None:
        return built
    built.close()
    return Refused(reason=miss.reason, fallback=built.failure)


def _missed(reason: str, made: BuildResult[T] | Refused | Later, store: Store, *, counts: bool = True) -> Obtained[T]:
    if counts:
        store.schedules.missed(reason, time.time())
    fallback = made.fallback if isinstance(made, Refused) else None
    value = made.value if isinstance(made, BuildResult) else None
    return Obtained(hit=Hit.MISS, value=value, miss_reason=reason, fallback=fallback)


def _not_used(error: CheckFailed) -> Miss | Refused:
    return Miss(reason=f"the stored schedule was not used: {error}")


def use_stored(
    materials: Mapping[str, Material],
    make: Callable[[], T],
    store: Store,
    *,
    disagrees: Callable[[CheckFailed], Miss | Refused] = _not_used,
) -> Taken[T] | Miss | Refused:
    """Call `make`, which turns stored material into something that runs, and count a use of each key.

    Unusable material is quarantined, and the answer is a miss. If the result differs from eager, the material is
    quarantined too, and `disagrees` gives the answer. Raises OutOfMemory, DeviceFault, StoreError, and what
    `disagrees` raises.
    """
    outcome: Miss | Refused
    try:
        value = make()
    except (OutOfMemory, DeviceFault):
        raise
    except CheckFailed as e:
        outcome = disagrees(e)
    except (EngineError, ValueError) as e:
        outcome = Miss(reason=f"the stored schedule was not used: {e}")
    else:
        touch(materials, store)
        return Taken(value=value)
    for key, material in materials.items():
        store.schedules.quarantine(key, outcome.reason, time.time(), digest=material.digest)
    return outcome


def touch(keys: Mapping[str, object], store: Store) -> None:
    """Count a use of each stored key."""
    for key in keys:
        store.schedules.touch(key, Hit.STORED, time.time())


def check_unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise ModelChanged if the parts of the key from `before` the code ran differ from those `after` it."""
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if changed:
        raise ModelChanged(f"the model changed while it was being loaded: {', '.join(changed)}; retrying may succeed")
