"""The schedule of a request as one JSON-able answer: key, graph, memory, candidates."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from nimble_jobs.planner.build import build_schedule
from nimble_jobs.planner.loaded import Loaded
from nimble_jobs.planner.prepare import BUILD_WAIT_S, build_module, save_built
from nimble_jobs.planner.request import Request, key_parts, schedule_key
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import Store


def explain(request: Request, *, device: torch.device, store: Store, build: bool = True) -> dict[str, Any]:
    """Key, hit, counts, bounds, memory and candidates, as `explain_schedule` finds them."""
    return explain_schedule(request, device=device, store=store, build=build)[0]


def explain_schedule(
    request: Request, *, device: torch.device, store: Store, build: bool = True
) -> tuple[dict[str, Any], Schedule | None]:
    """What there is to say, and the schedule itself where there is one. On a miss it is built and stored, unless told
    not to.

    Raises CannotRecord and EngineError where no schedule can be built: that is the explanation.
    """
    parts = key_parts(request, device)
    key = schedule_key(parts)
    answer, schedule = _known(parts, key, store)
    if schedule is not None or answer["refused"] is not None or not build:
        return answer, schedule
    with store.builds.turn(key, limit_s=BUILD_WAIT_S, waiting=lambda _: None):
        latest, schedule = _known(parts, key, store)
        if schedule is not None or latest["refused"] is not None:  # another process has built it since
            return latest, schedule
        start = time.perf_counter()
        module = build_module(request, device)
        loaded_s = time.perf_counter() - start
        built = build_schedule(module, request, key, device)
        loaded = Loaded(key=key, request=request, device=device, module=module, instances=built.instances)
        save_built(built, parts, store)
        loaded.close()
    stages = {"load_s": loaded_s, "build_s": built.schedule.build_s}
    return answer | _of_schedule(built.schedule) | {"stages": stages, "refused": built.failure}, built.schedule


def _known(parts: dict[str, str], key: str, store: Store) -> tuple[dict[str, Any], Schedule | None]:
    found = store.schedules.lookup(key)
    schedule = found.stored.load() if found.stored is not None else None
    answer = {
        "key": key,
        "key_parts": parts,
        "hit": "miss" if schedule is None else "stored",
        "miss_reason": found.reason,
        "refused": found.refused,
    }
    return (answer, None) if schedule is None else (answer | _of_schedule(schedule), schedule)


def _of_schedule(schedule: Schedule) -> dict[str, Any]:
    return {
        "device": schedule.device,
        "graph": asdict(schedule.facts),
        "memory": {"peak_bytes": schedule.peak_bytes, "arena_bytes": schedule.arena_bytes},
        "candidates": [asdict(c) for c in schedule.candidates],
        "replay_us": schedule.replay_us,
        "eager_us": schedule.eager_us,
        "error": schedule.error,
        "tolerance": schedule.tolerance,
        "stages": {"build_s": schedule.build_s},
    }
