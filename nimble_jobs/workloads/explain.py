"""What schedule a spec gets, without running the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nimble_jobs import planner
from nimble_jobs.draw import Drawing
from nimble_jobs.errors import NotFound
from nimble_jobs.planner.ahead import Told
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads.ahead import asked


def explain(
    spec: JobSpec,
    *,
    store: Store,
    build: bool = True,
    allowed_python: tuple[Path, ...] = (),
    memory_bytes: int | None = None,
    drawings: Sequence[Drawing] = (),
    told: Told = lambda _: None,
) -> dict[str, Any]:
    """Key, hit, graph, memory and candidates of the spec's schedule, which is built and stored on a miss if `build`.

    `memory_bytes`: the limit of the worker that will run the job, if it has one. Saves the drawings of it. `told` hears
    what is done. Raises UsageError for a fine-tuning, NotFound where there is
    nothing to draw, and whatever `planner.explain_schedule` raises.
    """
    request, device = asked(spec, allowed_python, memory_bytes)
    answer, schedule = planner.explain_schedule(request, device=device, store=store, build=build, told=told)
    if drawings and schedule is None:
        why = answer["fallback"] or answer["miss_reason"] or "it was never built"
        raise NotFound(f"{drawings[0].path}: no schedule to draw: {why}")
    for drawing in drawings:
        assert schedule is not None
        drawing.save(schedule)
    return answer
