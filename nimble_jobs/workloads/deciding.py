"""Decides what to build for a job that began in eager, once its rate is known.

`decided` chooses a plan for this job. `want` tells the store which schedule the job lacked, for idle workers to build.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.device import able
from nimble_jobs.payback import Decision, Situation, decide
from nimble_jobs.planner import Prepared
from nimble_jobs.planner.jobs.background import order_of
from nimble_jobs.planner.jobs.first_run import expected, idle_cores, kernels_and_call_s
from nimble_jobs.planner.jobs.prepared import FirstRun
from nimble_jobs.store import Demand, Miss
from nimble_jobs.workloads.context import JobContext

_HELD_UP = 0.2  # above this share of time spent waiting for input or for writers, no schedule makes the job faster
_MOSTLY_CALLS = 0.5  # below this share of time spent in the model, something else limits the job
_HITS = 20  # hits of the model's other schedules that count as a sign of more to come; two count as one


@dataclass(frozen=True, kw_only=True)
class At:
    """Where a job stands between two batches."""

    record: int  # the first of the next batch, in the order of the input
    done: int  # records of this attempt whose results are on the host
    left: int  # records of this attempt that have not been sent to the device yet
    run_s: float  # seconds since this attempt asked for its first batch
    waits: float = 0.0  # share of the time that the job's thread waited for input, or for those who take results
    idle: float = 0.0  # share of the time in which no batch was computed


def decided(context: JobContext, prepared: Prepared, run: FirstRun, at: At, demand: Demand) -> Decision:
    """What to build for a job that knows its rate by now. The expected costs are kept in `run`."""
    loaded, on_gpu = prepared.loaded, able(prepared.loaded.device).asynchronous
    assert run.began is not None
    record_s = (at.run_s - run.began[1]) / (at.done - run.began[0])
    call_s, quick_ratio = record_s * loaded.request.batch_size, None
    if loaded.schedule is not None:  # an earlier job has captured the quick candidate
        call_s, quick_ratio = loaded.schedule.eager_us / 1e6, 1.0
    elif on_gpu:
        batch_s = call_s
        kernels_s, alone_s = kernels_and_call_s(loaded, batch_s)
        call_s, quick_ratio = min(alone_s, batch_s), kernels_s / batch_s
    builds = context.store.schedules.builds(_device(prepared))
    model = run.parts.get("model.source", "")
    run.costs = expected(builds, model=model, on_gpu=on_gpu, call_s=call_s, quick_ratio=quick_ratio)
    situation = Situation(
        left=at.left,
        record_s=record_s,
        busy=_busy(at),
        spent_s=prepared.load_s + prepared.build_s + at.run_s,
        on_gpu=on_gpu,
        idle_cores=idle_cores(loaded.device),
        threads=1 if on_gpu else torch.get_num_threads(),
        beside=context.builders is not None,
        outlives=not context.job.foreground,
        uses=uses_of(context, demand),
        records=at.done + at.left,
    )
    return decide(situation, run.costs)


def _busy(at: At) -> float:
    """The share of time in which the model computes; 0 if a faster one would not help, as something else limits the
    job. While the launches of eager hold up a GPU, it counts as computing, and the job's thread does not wait.
    """
    busy = 1 - at.idle
    return 0.0 if at.waits > _HELD_UP or busy < _MOSTLY_CALLS else busy


def _device(prepared: Prepared) -> str:
    """The device's name as schedules store it."""
    return devices.describe(prepared.loaded.device)


def demand_of(context: JobContext, prepared: Prepared) -> Demand:
    """How often the schedule was missed, is wanted by queued jobs and timers, and could not be built."""
    return context.store.wanted.demand(prepared.loaded.key, context.job.spec, job=context.job.id)


def uses_of(context: JobContext, demand: Demand) -> float:
    """How many later uses of the schedule gain if this job builds it: uses that no idle worker's build would serve.

    The schedule is expected to be needed as often as it was missed before. In a worker, these uses count only if an
    idle build was tried, because then the idle times are too short for it.
    """
    if not context.job.foreground:
        return demand.queued + (demand.misses if demand.tries else 0)
    return demand.misses + demand.queued + demand.timers + min(demand.hits, _HITS) / 2


def want(context: JobContext, prepared: Prepared, run: FirstRun, at: At) -> None:
    """Tell the store, once for each job, that the job runs without its schedule."""
    if run.wanted:
        return
    run.wanted = True
    loaded, costs = prepared.loaded, run.costs
    batch_s = loaded.request.batch_size * at.run_s / at.done if at.done else 0.0
    if costs is None:
        builds = context.store.schedules.builds(_device(prepared))
        on_gpu = able(loaded.device).asynchronous
        costs = expected(builds, model=run.parts.get("model.source", ""), on_gpu=on_gpu, call_s=batch_s)
    saves_s = (at.done + at.left) / loaded.request.batch_size * batch_s * (1 - costs.build_ratio)
    miss = Miss(
        key=loaded.key,
        model=run.parts.get("model.source", ""),
        device=_device(prepared),
        input=run.parts.get("input", ""),
        request=order_of(loaded.key, loaded.request, loaded.device),
        saves_s=saves_s,
        costs_s=costs.build_s,
        why=run.why,
    )
    context.store.wanted.missed(miss, time.time())
