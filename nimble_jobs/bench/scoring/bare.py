"""The bare replay of a stored schedule: what the engine alone can do, with as many replays in flight as its job has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nimble_jobs.bench.in_flight import rate
from nimble_jobs.engine.launch import flight_streams
from nimble_jobs.errors import EngineError
from nimble_jobs.planner import Loaded, prepare
from nimble_jobs.planner.jobs.ahead import KeepsNothing
from nimble_jobs.spec import load
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads import ahead

_SAMPLE_S = 2.0


def bare(asked: dict[str, Any]) -> dict[str, Any]:
    """Records a second of the replays of the schedule that a spec finds in a store; without copies.

    Raises EngineError where the schedule is not stored or cannot be replayed.
    """
    spec = load(Path(asked["spec"]), ())
    allowed = tuple(Path(folder) for folder in asked["allow_python"])
    request, device = ahead.asked(spec, allowed)
    with open_store(resolve(asked["home"])) as store:
        prepared = prepare(request, device=device, store=store, residents=KeepsNothing())
        loaded = prepared.loaded
        try:
            if prepared.hit.value == "miss" or loaded.fallback is not None:
                raise EngineError(f"no bare replay: {loaded.fallback or 'the schedule is not stored'}")
            return {
                "records_per_s": _rate(loaded),
                "in_flight": len(loaded.every_instance()),
                "runs": "replay" if loaded.instances else "eager",
                "replay_us": loaded.schedule.replay_us if loaded.schedule else None,
            }
        finally:
            loaded.close()


def _rate(loaded: Loaded) -> float:
    instances, request, device = loaded.every_instance(), loaded.request, loaded.device
    batch = request.batch_size
    with torch.no_grad():
        if not instances:  # eager is faster here
            x = torch.zeros(request.input_shape, dtype=request.input_dtype, device=device)
            return rate(lambda _: loaded.module(x), [], device=device, batch=batch, sample_s=_SAMPLE_S)
        streams = flight_streams(device, len(instances)) if device.type == "cuda" else []
        return rate(
            lambda turn: instances[turn % len(instances)].replay(),
            streams,
            device=device,
            batch=batch,
            sample_s=_SAMPLE_S,
        )
