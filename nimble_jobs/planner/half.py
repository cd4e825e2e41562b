"""How one program of a training step is run, the search for the streams that run it fastest, and what was tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nimble_jobs import graph
from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import Recording
from nimble_jobs.planner.options import BuildOptions
from nimble_jobs.planner.plans import plans_with_streams
from nimble_jobs.planner.search import PAYS
from nimble_jobs.schedule import Candidate, GraphFacts, Plan

_MOST_STREAMS = 32  # gradients of weights are all independent, and libraries keep a workspace for every stream


@dataclass(frozen=True, kw_only=True)
class Half:
    """One program of a step, planned and measured."""

    plan: Plan
    facts: GraphFacts
    durations_us: tuple[float, ...]
    replay_us: float


def with_streams(
    recording: Recording,
    single: Half,
    capture: Callable[[Plan], Instance],
    options: BuildOptions,
    device: torch.device,
) -> tuple[Half, str | None]:
    """The plan that measures fastest, and the measured reason why none with several streams was tried."""
    best, program, times = single, recording.program, single.durations_us
    plans, why_not = plans_with_streams(program, single.facts, times, options, device)
    if plans and plans[0][0].streams > _MOST_STREAMS:
        plans[0] = graph.make_plan(program, durations_us=times, max_streams=_MOST_STREAMS)
    for plan, facts in plans:
        instance = capture(plan)
        try:
            replay_us = measure.time_us(instance.replay, device)
        finally:
            instance.close()
        if replay_us < best.replay_us * PAYS:
            best = replace(best, plan=plan, facts=facts, replay_us=replay_us)
    return best, why_not


def explained(candidates: Sequence[Candidate], winner: Candidate, eager: Candidate) -> tuple[Candidate, ...]:
    """Everything that was tried, with eager in front and the winner marked."""
    return (
        eager,
        *(
            replace(c, chosen=True, reason="the fastest that passed its check")
            if c is winner
            else replace(c, reason=c.reason or f"slower than {winner.name}")
            for c in candidates
        ),
    )
