"""Simulates when each task of a schedule runs, as if tasks did not slow each other down."""

from __future__ import annotations

from dataclasses import dataclass

from nimble_jobs.errors import PlanError
from nimble_jobs.graph.bounds import critical_path
from nimble_jobs.graph.check import check_order
from nimble_jobs.graph.dag import build_dag
from nimble_jobs.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times from the start of one replay; microseconds, or units of one task where nothing was measured."""

    measured: bool
    start_us: tuple[float, ...]  # by task index
    end_us: tuple[float, ...]  # by task index
    makespan_us: float
    critical: tuple[int, ...]  # tasks of a longest path over the dependency graph, first to last
    critical_path_us: float
    total_work_us: float
    idle_share: tuple[float, ...]  # by stream: the share of the makespan in which it runs nothing


def simulate(schedule: Schedule) -> Timing:
    """Run the plan on a machine where each task takes its own time on its stream, in launch order, after what it waits
    for. Without measured times each task counts as one unit.

    On a device tasks do slow each other down, so the makespan is no prediction. Raises PlanError for a plan that leaves
    a dependency unordered, or if there is not one time for each task.
    """
    program, plan = schedule.program, schedule.plan
    dag = build_dag(program)
    check_order(dag, plan)
    measured = bool(schedule.durations_us)
    cost = schedule.durations_us if measured else (1.0,) * dag.n
    if len(cost) != dag.n or not all(0 <= us < float("inf") for us in cost):
        raise PlanError(f"the schedule holds {len(cost)} task times for {dag.n} tasks, or an invalid time")
    waits: list[list[int]] = [[] for _ in cost]
    for sync in plan.syncs:
        waits[sync.after].append(sync.before)
    start = [0.0] * dag.n
    end = [0.0] * dag.n
    free = [0.0] * plan.streams
    busy = [0.0] * plan.streams
    for task in plan.order:
        stream = plan.stream_of[task]
        start[task] = max((end[before] for before in waits[task]), default=0.0)
        start[task] = max(start[task], free[stream])
        end[task] = free[stream] = start[task] + cost[task]
        busy[stream] += cost[task]
    makespan = max(free, default=0.0)
    length, path = critical_path(dag, cost)
    return Timing(
        measured=measured,
        start_us=tuple(start),
        end_us=tuple(end),
        makespan_us=makespan,
        critical=path,
        critical_path_us=length,
        total_work_us=sum(cost),
        idle_share=tuple(max(0.0, 1 - b / makespan) if makespan else 0.0 for b in busy),
    )
