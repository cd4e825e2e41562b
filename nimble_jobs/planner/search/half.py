"""How one program of a training step is run, the search for the streams that run it fastest, and what was tried."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nimble_jobs import graph
from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import Recording
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.candidate import PAYS
from nimble_jobs.planner.search.contest import Contest
from nimble_jobs.planner.search.plans import plans_with_streams
from nimble_jobs.schedule import Candidate, GraphFacts, Plan

_MOST_STREAMS = 32  # gradients of weights are all independent, and libraries keep a workspace for every stream
_FEWER_STREAMS = 8  # the most of plans with fewer streams than may run at once
_MOST_PLANS = 3  # to be captured and measured: for a whole step each takes long


@dataclass(frozen=True, kw_only=True)
class Half:
    """One program of a step, planned and measured."""

    plan: Plan
    facts: GraphFacts
    durations_us: tuple[float, ...]
    replay_us: float


def streams_may_pay(half: Half, options: BuildOptions, device: torch.device) -> bool:
    """Whether several streams are allowed, and there is something to run on them."""
    return device.type != "cpu" and options.streams != 1 and half.facts.width >= 2


def with_streams(
    recording: Recording,
    single: Half,
    capture: Callable[[Plan], Instance],
    options: BuildOptions,
    device: torch.device,
    deadline: float = math.inf,
) -> tuple[Half, str | None]:
    """The plan that measures fastest, and the reason why no other, or none at all, with several streams was tried.

    After the `deadline`, on the clock of `time.monotonic`, no further one is captured.
    """
    best, program, times = single, recording.program, single.durations_us
    plans, why_not = plans_with_streams(program, single.facts, times, options, device)
    if plans and plans[-1][0].streams > _MOST_STREAMS:
        plans[-1] = graph.make_plan(program, durations_us=times, max_streams=_MOST_STREAMS)
    fewer = [planned for planned in reversed(plans[:-1]) if planned[0].streams <= _FEWER_STREAMS]
    for plan, facts in [*plans[-1:], *fewer][:_MOST_PLANS]:
        if time.monotonic() > deadline:
            return best, budget_used_up(options)
        instance = capture(plan)
        try:
            replay_us = measure.time_us(instance.replay, device)
        finally:
            instance.close()
        if replay_us < best.replay_us * PAYS:
            best = replace(best, plan=plan, facts=facts, replay_us=replay_us)
    return best, why_not


def budget_used_up(options: BuildOptions) -> str:
    """Why a candidate was not tried after the deadline."""
    return f"not tried: the budget of {options.budget_s:.0f} s was used up"


def explained(
    candidates: Sequence[Candidate], winner: Candidate, eager: Candidate, in_turns: Contest | None = None
) -> tuple[Candidate, ...]:
    """Everything that was tried, with eager in front and the winner marked."""
    won = "the fastest that passed its check"
    stays_eager = in_turns is not None and in_turns.eager_wins
    if in_turns is not None and stays_eager:
        won += "; slower than eager"
        eager = replace(eager, chosen=True, reason=f"{eager.reason}; {in_turns.over(winner.name)}")
    return (
        eager,
        *(
            replace(c, chosen=not stays_eager, reason=won)
            if c is winner
            else replace(c, reason=c.reason or f"slower than {winner.name}")
            for c in candidates
        ),
    )
