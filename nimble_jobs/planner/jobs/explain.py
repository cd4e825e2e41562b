"""The schedule of a request as one JSON-able answer: key, stages, graph, memory, candidates."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from nimble_jobs.engine.bind import arena_plan
from nimble_jobs.planner.jobs.ahead import Answer, Told, look_up, look_up_or_build
from nimble_jobs.planner.keys.request import Request
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import Store


def explain_schedule(
    request: Request, *, device: torch.device, store: Store, build: bool = True, told: Told = lambda _: None
) -> tuple[dict[str, Any], Schedule | None]:
    """What there is to say, and the schedule itself where there is one. On a miss it is built and stored, unless told
    not to.

    Where no schedule can be had, `fallback` says why. Raises ModelError, OutOfMemory.
    """
    if build:
        found = look_up_or_build(request, device=device, store=store, told=told)
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
        "error": schedule.error,
        "tolerance": schedule.tolerance,
        "graph": asdict(schedule.facts),
        "memory": _memory(schedule),
        "candidates": [asdict(c) for c in schedule.candidates],
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
