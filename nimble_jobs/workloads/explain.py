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
from nimble_jobs.workloads.training import ahead as training


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

    Of a fine-tuning it is that of the step that updates the weights; with accumulation `accumulate` holds the same of
    the other batches. `memory_bytes`: the limit of the worker that will run the job, if it has one. Saves the drawings.
    `told` hears what is done. Raises NotFound where there is nothing to draw, ModelError, DataError, OutOfMemory.
    """
    if spec.kind == "finetune":
        found = training.explain(spec, store=store, build=build, allowed_python=allowed_python, told=told)
        answer, schedule = planner.explained(found[True]), found[True].schedule
        if False in found:
            answer["accumulate"] = planner.explained(found[False])
    else:
        request, device = asked(spec, allowed_python, memory_bytes)
        answer, schedule = planner.explain_schedule(request, device=device, store=store, build=build, told=told)
    if drawings and schedule is None:
        why = answer["fallback"] or answer["miss_reason"] or "it was never built"
        raise NotFound(f"{drawings[0].path}: no schedule to draw: {why}")
    for drawing in drawings:
        assert schedule is not None
        drawing.save(schedule)
    return answer
