"""From a program to a checked plan, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nimble_jobs.errors import UsageError
from nimble_jobs.graph.bounds import critical_path, width
from nimble_jobs.graph.check import check_concurrency, check_order
from nimble_jobs.graph.collectives import beside, collectives
from nimble_jobs.graph.dag import Dag, build_dag
from nimble_jobs.graph.matching import maximum_matching
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.graph.reduction import minimum_equivalent_graph
from nimble_jobs.graph.streams import Sharing, cap, chains, cross_stream, fewest_syncs, launch_order, share
from nimble_jobs.schedule import GraphFacts, Plan, Program


@dataclass(frozen=True)
class Analysis:
    """What planning needs to know about a program's graph. Computed once, for any number of plans."""

    dag: Dag
    meg: Dag  # the minimum equivalent graph
    matching: tuple[int | None, ...]  # by task: the next task of its chain
    sharing: Sharing  # chains strung together on streams
    width: int
    width_exact: bool  # else `width` is an upper bound
    collectives: tuple[int, ...] = ()  # tasks that wait for other ranks; few streams are not made to wait with them

    @classmethod
    @collector_paused()
    def of(cls, program: Program) -> Analysis:
        """Analyse a recorded program."""
        return replace(cls.of_dag(build_dag(program)), collectives=collectives(program))

    @classmethod
    def of_dag(cls, dag: Dag) -> Analysis:
        """Analyse a dependency graph that was built earlier."""
        meg = minimum_equivalent_graph(dag)
        matching = maximum_matching(meg)
        sharing = share(meg, chains(matching))
        return cls(dag, meg, tuple(matching), sharing, *width(meg, matching, sharing.bridges))

    @collector_paused()
    def plan(
        self, *, max_streams: int | None = None, durations_us: Sequence[float] | None = None
    ) -> tuple[Plan, GraphFacts]:
        """A checked plan with maximum concurrency and the fewest synchronisations, or as near as `max_streams` allows.

        `durations_us` are the measured times of the tasks in microseconds, in program order. Raises UsageError for a
        bad argument and PlanError if the result fails its own check.
        """
        _check_arguments(self.dag, max_streams, durations_us)
        if max_streams is None or self.sharing.streams <= max_streams:
            order, stream_of = launch_order(self.meg, durations_us), self.sharing.stream_of
            plan = Plan(order=order, stream_of=stream_of, syncs=cross_stream(self.meg, stream_of))
            check_concurrency(self.meg, plan)
        else:
            order, stream_of = cap(self.meg, self.matching, max_streams, durations_us)
            stream_of = beside(stream_of, self.collectives) if self.collectives else stream_of
            plan = Plan(order=order, stream_of=stream_of, syncs=fewest_syncs(self.meg, order, stream_of))
        check_order(self.dag, plan)
        return plan, self._facts(plan, durations_us)

    def single_stream(self, durations_us: Sequence[float] | None = None) -> tuple[Plan, GraphFacts]:
        """A plan with every task on one stream, in program order. The facts still say what the graph would allow.

        Collectives have a second stream, so that the first one goes on while they wait for other ranks.
        """
        _check_arguments(self.dag, None, durations_us)
        order, stream_of = tuple(range(self.dag.n)), (0,) * self.dag.n
        plan = Plan(order=order, stream_of=stream_of, syncs=())
        if self.collectives:
            stream_of = beside(stream_of, self.collectives)
            plan = Plan(order=order, stream_of=stream_of, syncs=fewest_syncs(self.meg, order, stream_of))
            check_order(self.dag, plan)
        return plan, self._facts(plan, durations_us)

    def _facts(self, plan: Plan, durations_us: Sequence[float] | None) -> GraphFacts:
        matched = sum(after is not None for after in self.matching)
        return GraphFacts(
            tasks=self.dag.n,
            edges=self.dag.edges,
            meg_edges=self.meg.edges,
            matching=matched,
            width=self.width,
            width_exact=self.width_exact,
            streams=plan.streams,
            syncs_needed=self.meg.edges - matched,
            syncs_used=len(plan.syncs),
            critical_path_us=critical_path(self.meg, durations_us)[0] if durations_us is not None else None,
            total_work_us=float(sum(durations_us)) if durations_us is not None else None,
        )


def make_plan(
    program: Program, *, max_streams: int | None = None, durations_us: Sequence[float] | None = None
) -> tuple[Plan, GraphFacts]:
    """Analyse a program for a single plan: `Analysis.plan`."""
    return Analysis.of(program).plan(max_streams=max_streams, durations_us=durations_us)


def single_stream(program: Program, *, durations_us: Sequence[float] | None = None) -> tuple[Plan, GraphFacts]:
    """Analyse a program for a single plan: `Analysis.single_stream`."""
    return Analysis.of(program).single_stream(durations_us)


def _check_arguments(dag: Dag, max_streams: int | None, durations_us: Sequence[float] | None) -> None:
    if max_streams is not None and max_streams < 1:
        raise UsageError(f"max_streams is {max_streams}; expected at least 1")
    if durations_us is not None:
        if len(durations_us) != dag.n:
            raise UsageError(f"durations_us has {len(durations_us)} entries; expected {dag.n}, one for each task")
        if not all(0 <= us < float("inf") for us in durations_us):
            raise UsageError(
                "durations_us holds a negative or non-finite time; expected finite microseconds, 0 or more"
            )
