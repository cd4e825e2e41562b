"""Schedules built before a job asks for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nimble_jobs.job import Hit
from nimble_jobs.planner.loaded import Resident
from nimble_jobs.planner.prepare import prepare
from nimble_jobs.planner.request import Request, key_parts, schedule_key
from nimble_jobs.store import Store


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
    device: str | None  # in words: what replay and eager were measured on
    fallback: str | None  # why jobs will run in eager


class KeepsNothing:
    """Residents of a process that keeps nothing."""

    def get(self, key: str) -> None:
        return None

    def put(self, key: str, value: Resident) -> None: ...

    def make_room(self, nbytes: int) -> None: ...


def build_ahead(request: Request, *, device: torch.device, store: Store) -> Ahead:
    """Store the schedule of a request, unless it is stored. Raises ModelError, OutOfMemory."""
    parts = key_parts(request, device)
    key = schedule_key(parts)
    found = store.schedules.lookup(key)
    if found.stored is not None:
        schedule = found.stored.load()
        return Ahead(
            key=key,
            input=parts["input"],
            hit=True,
            miss_reason=None,
            build_s=schedule.build_s,
            replay_us=schedule.replay_us,
            eager_us=schedule.eager_us,
            device=schedule.device,
            fallback=None,
        )
    wanted = replace(request, schedule=request.schedule.model_copy(update={"on_miss": "build"}))
    prepared = prepare(wanted, device=device, store=store, residents=KeepsNothing())
    try:
        built, fallback = prepared.loaded.schedule, prepared.loaded.fallback
    finally:
        prepared.loaded.close()
    return Ahead(
        key=key,
        input=parts["input"],
        hit=prepared.hit is not Hit.MISS,
        miss_reason=prepared.miss_reason,
        build_s=built.build_s if built else None,
        replay_us=built.replay_us if built else None,
        eager_us=built.eager_us if built else None,
        device=built.device if built else None,
        fallback=fallback,
    )
