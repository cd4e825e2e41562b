"""Schedules before a job asks for them: looked up, built now as a job would build them, or explained."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nimble_jobs.engine import process_settings
from nimble_jobs.engine.bind import arena_plan
from nimble_jobs.job import Hit
from nimble_jobs.kernel_switches import PART, switched_off
from nimble_jobs.planner.jobs.loaded import Report, Resident
from nimble_jobs.planner.jobs.prepare import prepare
from nimble_jobs.planner.keys.request import Request, key_parts, schedule_key
from nimble_jobs.planner.lookup.stored import Refused, Taken, read_stored
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import Store

Say = Callable[[str], None]  # is given, in words, what is being done

_PHASES = {"load": "loading the model", "build": "measuring eager", "check": "checking what is stored"}
WAITING = "waiting for another process that is building it"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The schedule of a request, or why there is none."""

    key: str
    parts: dict[str, str]
    hit: Hit
    miss_reason: str | None = None
    schedule: Schedule | None = None
    fallback: str | None = None  # why jobs run in eager
    load_s: float | None = None  # of a hit: reading and hashing it; of one built now: the model, onto the device


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A schedule that is stored now, or the reason why there is none."""

    key: str
    input: str  # with its shape
    hit: bool  # it was stored before
    miss_reason: str | None
    build_s: float | None  # this build's, or that of the schedule that was there
    replay_us: float | None
    eager_us: float | None
    runs: str | None  # schedule | eager: what was measured to be faster
    taken_from: dict[str, str] | None  # the sibling whose choice this is: its key, and its batch in words
    device: str | None  # in words: what replay and eager were measured on
    fallback: str | None  # why jobs will run in eager

    @classmethod
    def of(
        cls,
        schedule: Schedule | None,
        *,
        key: str,
        input: str,  # noqa: A002  # the field's name
        hit: Hit,
        miss_reason: str | None,
        fallback: str | None,
        build_s: float | None = None,
    ) -> Ahead:
        """An answer with the figures of a schedule, if there is one; `build_s` replaces the schedule's own."""
        return cls(
            key=key,
            input=input,
            hit=hit is not Hit.MISS,
            miss_reason=miss_reason,
            build_s=build_s if build_s is not None or schedule is None else schedule.build_s,
            replay_us=schedule.replay_us if schedule else None,
            eager_us=schedule.eager_us if schedule else None,
            runs=schedule.runs if schedule else None,
            taken_from=schedule.sibling if schedule else None,
            device=schedule.device if schedule else None,
            fallback=fallback,
        )


class KeepsNothing:
    """Residents of a process that keeps nothing."""

    def get(self, key: str) -> None:
        return None

    def put(self, key: str, value: Resident) -> None: ...

    def drop(self, key: str) -> None: ...

    def make_room(self, nbytes: int) -> None: ...

    def several(self) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)


def reporter(say: Say) -> Report:
    """What tells, in words, what a job would report."""

    def report(*, phase: str, schedule: dict[str, Any] | None = None) -> None:
        say(f"trying {schedule['trying']}" if schedule is not None else _PHASES[phase])

    return report


def look_up(request: Request, *, device: torch.device, store: Store) -> Answer:
    """What is stored, read whole as a job would read it; what is missing or damaged is quarantined. Builds nothing, and
    counts as no use.
    """
    return look_up_parts(key_parts(request, device), store=store)


def look_up_parts(parts: dict[str, str], *, store: Store) -> Answer:
    """`look_up` by the parts of a key."""
    start = time.perf_counter()
    key = schedule_key(parts)
    found = read_stored(key, store)
    if not isinstance(found, Taken):
        fallback = found.fallback if isinstance(found, Refused) else None
        return Answer(key=key, parts=parts, hit=Hit.MISS, miss_reason=found.reason, fallback=fallback)
    seconds = time.perf_counter() - start
    return Answer(key=key, parts=parts, hit=Hit.STORED, schedule=found.value.schedule, load_s=seconds)


def look_up_or_build(request: Request, *, device: torch.device, store: Store, say: Say = lambda _: None) -> Answer:
    """What is stored; on a miss it is prepared as for a job, and so built and stored.

    Raises ModelError, OutOfMemory.
    """
    answer = look_up(request, device=device, store=store)
    return answer if answer.schedule is not None else _built(answer, request, device, store, say)


def _built(answer: Answer, request: Request, device: torch.device, store: Store, say: Say) -> Answer:
    """The answer after a miss: the schedule was built now, or loaded because another process was quicker."""
    wanted = replace(request, schedule=request.schedule.model_copy(update={"on_miss": "build"}))
    settings = process_settings.taken()
    try:
        prepared = prepare(
            wanted,
            device=device,
            store=store,
            residents=KeepsNothing(),
            report=reporter(say),
            waiting=lambda _: say(WAITING),
        )
        prepared.loaded.close()
    finally:
        process_settings.put(settings)  # which the model's code may have changed: they are in keys
    return replace(
        answer,
        hit=prepared.hit,
        miss_reason=prepared.miss_reason,
        schedule=prepared.loaded.schedule,
        fallback=prepared.loaded.fallback,
        load_s=prepared.load_s,
    )


def build_ahead(request: Request, *, device: torch.device, store: Store, say: Say = lambda _: None) -> Ahead:
    """Store the schedule of a request, unless it is stored. Counts as a use, hit or miss, as a job's would.

    Raises ModelError, OutOfMemory.
    """
    found = look_up(request, device=device, store=store)
    if found.schedule is not None:
        store.schedules.touch(found.key, Hit.STORED, time.time())
    else:
        found = _built(found, request, device, store, say)
    return Ahead.of(
        found.schedule,
        key=found.key,
        input=found.parts["input"],
        hit=found.hit,
        miss_reason=found.miss_reason,
        fallback=found.fallback,
    )


def explain_schedule(
    request: Request, *, device: torch.device, store: Store, build: bool = True, say: Say = lambda _: None
) -> tuple[dict[str, Any], Schedule | None]:
    """What there is to say, and the schedule itself if there is one. On a miss it is built and stored, unless told
    not to.

    Where no schedule can be had, `fallback` says why. Raises ModelError, OutOfMemory.
    """
    if build:
        found = look_up_or_build(request, device=device, store=store, say=say)
    else:
        found = look_up(request, device=device, store=store)
    return explained(found), found.schedule


def explained(found: Answer) -> dict[str, Any]:
    """What there is to say of an answer."""
    answer: dict[str, Any] = {
        "key": found.key,
        "key_parts": found.parts,
        "hit": found.hit.value,
        "miss_reason": found.miss_reason,
        "fallback": found.fallback,
        "switched_off": sorted(switched_off(found.parts.get(PART))),
    }
    schedule = found.schedule
    if schedule is not None:
        seconds = {f"{name}_s": value for name, value in schedule.stages}
        answer |= _of_schedule(schedule)
        answer["stages"] = {"load_s": found.load_s, **seconds, "build_s": schedule.build_s}
    return answer


def _of_schedule(schedule: Schedule) -> dict[str, Any]:
    return {
        "device": schedule.device,
        "kernels": schedule.kernels,
        "layout": schedule.layout,
        "folded": len(schedule.folded),
        "merged": sum(len(group) for group in schedule.merged),
        "in_flight": schedule.in_flight,
        "replay_us": schedule.replay_us,
        "eager_us": schedule.eager_us,
        "noise": schedule.noise,
        "runs": schedule.runs,
        "taken_from": schedule.sibling,
        "error": schedule.error,
        "tolerance": schedule.tolerance,
        "graph": asdict(schedule.facts),
        "memory": _memory(schedule),
        "candidates": [asdict(c) for c in schedule.candidates],
        "choices": [asdict(c) for c in schedule.choices],
    }


def _memory(schedule: Schedule) -> dict[str, int]:
    """Bytes of all instances, and of one arena: as it is, without any reuse, and the least that one stream needs."""
    planned = arena_plan(schedule.program, schedule.plan)
    return {
        "peak_bytes": schedule.peak_bytes,
        "arena_bytes": schedule.arena_bytes,
        "arena_without_reuse_bytes": planned.total_bytes,
        "arena_floor_bytes": planned.floor_bytes,
    }
