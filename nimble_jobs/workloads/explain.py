"""The schedule that a spec gets, without running its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nimble_jobs import planner
from nimble_jobs.models.pictures import with_model_transform
from nimble_jobs.planner.jobs.ahead import Say
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.schedule import Schedule
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads.ahead import asked_each
from nimble_jobs.workloads.forecast import forecast
from nimble_jobs.workloads.training import ahead as training
from nimble_jobs.workloads.training import text_ahead as text_training


def explain(
    spec: JobSpec,
    *,
    store: Store,
    build: bool = True,
    allowed_python: tuple[Path, ...] = (),
    memory_bytes: int | None = None,
    say: Say = lambda _: None,
) -> tuple[dict[str, Any], Schedule | None]:
    """Key, hit, graph, memory and candidates of the spec's schedule, and the schedule itself if there is one.

    On a miss it is built and stored if `build` is set. For a fine-tuning, it is the schedule of the step that updates
    the weights; `accumulate` describes the one for batches that only accumulate. For texts, it is the schedule of the
    bucket with most records; `buckets` lists all. `memory_bytes` is the `--gpu-memory`
    of the worker that will run the job, if you set one. `say` hears what is going on. Raises ModelError, DataError,
    OutOfMemory.
    """
    spec = with_model_transform(spec)
    if spec.kind == "finetune":
        buckets = None
        if spec.input.format == "text":
            found, buckets = text_training.explain(
                spec, store=store, build=build, allowed_python=allowed_python, say=say
            )
        else:
            found = training.explain(spec, store=store, build=build, allowed_python=allowed_python, say=say)
        answer, schedule = planner.explained(found[Role.UPDATE]), found[Role.UPDATE].schedule
        if Role.ACCUMULATE in found:
            answer["accumulate"] = planner.explained(found[Role.ACCUMULATE])
        if buckets is not None:
            answer["buckets"] = buckets
    else:
        wanted = asked_each(spec, store=store, allowed_python=allowed_python, memory_bytes=memory_bytes)
        each = {
            number: planner.explain_schedule(
                wanted.requests[number], device=wanted.device, store=store, build=build, say=say
            )
            for number in wanted.in_turn
        }
        found_all = [each[number] for number in range(len(each))]
        answer, schedule = found_all[wanted.main]
        answer["first_run"] = forecast(spec, wanted.requests[wanted.main], wanted.device, answer, store)
        if wanted.texts is not None:
            answer["buckets"] = [
                {"length": bucket.length, "batch": bucket.rows, "share": share, "key": one["key"], "hit": one["hit"]}
                | {name: one.get(name) for name in ("fallback", "runs", "replay_us", "eager_us")}
                for bucket, share, (one, _) in zip(wanted.texts.buckets, wanted.texts.shares, found_all, strict=True)
            ]
    return answer, schedule
