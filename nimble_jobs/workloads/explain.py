"""What schedule a spec gets, without running the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nimble_jobs import planner
from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import UsageError
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads.score import request_of


def explain(
    spec: JobSpec, *, store: Store, build: bool = True, allowed_python: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Key, hit, graph, memory and candidates of the spec's schedule, which is built and stored on a miss if `build`.

    Raises UsageError for a fine-tuning, which has no schedule yet, and whatever `planner.explain` raises.
    """
    if spec.kind != "score":
        raise UsageError(f"kind: {spec.kind} has no schedule to explain; expected score")
    with open_reader(spec.input) as reader:
        request = request_of(spec, reader, allowed_python)
    return planner.explain(request, device=devices.resolve(spec.run.device), store=store, build=build)
