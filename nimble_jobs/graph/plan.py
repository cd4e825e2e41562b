"""The whole way from a program to a checked plan."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_jobs.errors import UsageError
from nimble_jobs.graph.bounds import critical_path, width
from nimble_jobs.graph.check import check_concurrency, check_order
from nimble_jobs.graph.dag import Dag, build_dag
from nimble_jobs.graph.matching import maximum_matching
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.graph.reduction import minimum_equivalent_graph
from nimble_jobs.graph.streams import Sharing, cap, chains, cross_stream, fewest_syncs, launch_order, share
from nimble_jobs.schedule import GraphFacts, Plan, Program


@collector_paused()
def make_plan(
    program: Program, *, max_streams: int | None = None, durations_us: Sequence[float] | None = None
) -> tuple[Plan, GraphFacts]:
    """A checked plan with maximum concurrency and the fewest synchronisations, or as near as `max_streams` allows.

    `durations_us` are the measured times of the tasks, in program order. Raises PlanError if the result failed its own
    check.
    """
    return plan_dag(build_dag(program), max_streams=max_streams, durations_us=durations_us)


def plan_dag(
    dag: Dag, *, max_streams: int | None = None, durations_us: Sequence[float] | None = None
) -> tuple[Plan, GraphFacts]:
    """`make_plan` for a dependency graph that is known already."""
    _check_arguments(dag, max_streams, durations_us)
    meg = minimum_equivalent_graph(dag)
    matching = maximum_matching(meg)
    sharing = share(meg, chains(matching))
    if max_streams is None or sharing.streams <= max_streams:
        order, stream_of = launch_order(meg, durations_us), sharing.stream_of
        plan = Plan(order=order, stream_of=stream_of, syncs=cross_stream(meg, stream_of))
        check_concurrency(meg, plan)
    else:
        order, stream_of = cap(meg, matching, max_streams, durations_us)
        plan = Plan(order=order, stream_of=stream_of, syncs=fewest_syncs(meg, order, stream_of))
    check_order(dag, plan)
    return plan, _facts(dag, meg, matching, sharing, plan, durations_us)


@collector_paused()
def single_stream(program: Program, *, durations_us: Sequence[float] | None = None) -> tuple[Plan, GraphFacts]:
    """Everything on one stream in program order. The facts still say what the graph would allow."""
    dag = build_dag(program)
    _check_arguments(dag, None, durations_us)
    meg = minimum_equivalent_graph(dag)
    matching = maximum_matching(meg)
    plan = Plan(order=tuple(range(dag.n)), stream_of=(0,) * dag.n, syncs=())
    return plan, _facts(dag, meg, matching, share(meg, chains(matching)), plan, durations_us)


def _facts(
    dag: Dag,
    meg: Dag,
    matching: Sequence[int | None],
    sharing: Sharing,
    plan: Plan,
    durations_us: Sequence[float] | None,
) -> GraphFacts:
    matched = sum(after is not None for after in matching)
    widest, exact = width(meg, matching, sharing.bridges)
    return GraphFacts(
        tasks=dag.n,
        edges=dag.edges,
        meg_edges=meg.edges,
        matching=matched,
        width=widest,
        width_exact=exact,
        streams=plan.streams,
        syncs_needed=meg.edges - matched,
        syncs_used=len(plan.syncs),
        critical_path_us=critical_path(meg, durations_us)[0] if durations_us is not None else None,
        total_work_us=float(sum(durations_us)) if durations_us is not None else None,
    )


def _check_arguments(dag: Dag, max_streams: int | None, durations_us: Sequence[float] | None) -> None:
    if max_streams is not None and max_streams < 1:
        raise UsageError(f"max_streams is {max_streams}; expected at least 1")
    if durations_us is not None:
        if len(durations_us) != dag.n:
            raise UsageError(f"durations_us has {len(durations_us)} entries; expected {dag.n}, one a task")
        if not all(0 <= us < float("inf") for us in durations_us):
            raise UsageError("durations_us holds a negative or non-finite time; expected microseconds")
