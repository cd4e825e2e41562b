"""Predicts what a job would decide if its schedule were not stored, as far as that is known before it runs."""

from __future__ import annotations

from typing import Any

import torch

from nimble_jobs.data import open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.device import able
from nimble_jobs.payback import Situation, decide
from nimble_jobs.planner import Request
from nimble_jobs.planner.jobs.first_run import expected, idle_cores
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Store
from nimble_jobs.workloads.text.setup import ColumnOfText


def forecast(
    spec: JobSpec, request: Request, device: torch.device, answer: dict[str, Any], store: Store
) -> dict[str, Any] | None:
    """The plan of a first run over all records of the input, with its reason; None if the spec asks for something else.

    It is based on eager's time in the schedule of `answer`. Without a schedule, only the way of deciding is known.
    """
    if spec.schedule.on_miss != "build" or spec.schedule.progressive != "auto":
        return None
    eager_us = answer.get("eager_us")
    if eager_us is None:
        why = "a job begins in eager and decides once it knows its rate; if it builds nothing, an idle worker will"
        return {"plan": None, "why": why}
    with open_reader(spec.input, tokens=ColumnOfText(spec)) as reader:
        records = reader.total
    on_gpu, call_s = able(device).asynchronous, eager_us / 1e6
    builds = store.schedules.builds(devices.describe(device))
    costs = expected(builds, model=answer["key_parts"].get("model.source", ""), on_gpu=on_gpu, call_s=call_s)
    situation = Situation(
        left=records,
        record_s=call_s / request.batch_size,
        on_gpu=on_gpu,
        idle_cores=idle_cores(device),
        threads=1 if on_gpu else torch.get_num_threads(),
    )
    found = decide(situation, costs)
    return {"plan": found.plan.value, "why": found.why, "cost_s": found.cost_s, "saving_s": found.saving_s}
