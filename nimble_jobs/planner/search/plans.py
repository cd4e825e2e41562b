"""Plans of a program: the time of each task alone, how many streams are worth a try, and captures of a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.bind import arena_plan, bind, planned_bytes
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.inputs import Below
from nimble_jobs.engine.record import Recording, state_of
from nimble_jobs.engine.workspace import workspace_bytes
from nimble_jobs.errors import OutOfMemory
from nimble_jobs.graph import Analysis
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.candidate import MeasuredCandidate
from nimble_jobs.planner.search.target import PlannedProgram, Programs, Target
from nimble_jobs.planner.sources.fold import Pairs
from nimble_jobs.planner.sources.source import AS_GIVEN, Kernels, Source
from nimble_jobs.schedule import GraphFacts, Plan

_CAPS = (2, 4, 8, 16)
_EAGER_FAR_BEHIND = 2.5  # times as long as compiled kernels; another layout or folded weights save less
_FAR_BEHIND = 1.5  # times as long on one stream, which no number of streams made up for where it was measured
_WORTH_TRYING = 0.98  # critical path over total work, above which streams are not tried
_MOST_STREAMS = 32  # gradients of weights are all independent, and libraries keep a workspace for every stream
_FEWER_STREAMS = 8  # the most of plans with fewer streams than may run at once
_MOST_PLANS = 3  # to be captured and measured: for a whole step each takes long


def durations_us(
    recording: Recording,
    plan: Plan,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    below: Below,
    integers: Mapping[str, torch.Tensor],
    put_back: Callable[[], object] = lambda: None,
) -> tuple[float, ...]:
    """Measured time of each task alone, by task index, on fresh input. Raises EngineError, OutOfMemory.

    `put_back` undoes what tasks write into the state.
    """
    try:
        bound = bind(
            recording.program,
            plan,
            state=state,
            constants=recording.constants,
            kernels=recording.kernels,
            device=device,
        )
        for name, value in verify.random_inputs(recording.program.inputs, device, 0, below, integers).items():
            bound.inputs[name].copy_(value)
        return tuple(measure.task_times_us(bound, device, put_back=put_back))
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} to time each task: {e}") from e


def plan_on_one_stream(recording: Recording) -> PlannedProgram:
    """The recorded program, planned on one stream; its tasks are not timed yet."""
    analysis = Analysis.of(recording.program)
    plan, facts = analysis.single_stream()
    memory = arena_plan(recording.program, plan)
    return PlannedProgram(
        recording=recording, analysis=analysis, plan=plan, memory=memory, facts=facts, durations_us=()
    )


def with_times(target: Target, source: Source, programs: Programs) -> Programs:
    """Programs that are planned on one stream, with the time of each task alone. Raises EngineError, OutOfMemory."""
    found = {}
    for role, planned in programs.items():
        times = target.task_times_us(source, role, planned.recording, planned.plan)
        _, facts = planned.analysis.single_stream(times)
        found[role] = replace(planned, facts=facts, durations_us=times)
    return found


def plan_on_streams(program: PlannedProgram, streams: int) -> PlannedProgram:
    """The program with a plan on at most so many streams."""
    return with_plan(program, *program.analysis.plan(durations_us=program.durations_us, max_streams=streams))


def with_plan(program: PlannedProgram, plan: Plan, facts: GraphFacts) -> PlannedProgram:
    """The program with another plan, and the memory that it needs."""
    return replace(program, plan=plan, facts=facts, memory=arena_plan(program.recording.program, plan))


def plans_with_streams(
    program: PlannedProgram, options: BuildOptions, device: torch.device
) -> tuple[list[tuple[Plan, GraphFacts]], str | None]:
    """Plans with more than one stream that are worth a try, or the measured reason why none is. `program` is planned on
    one stream.
    """
    limit, facts, times = options.streams, program.facts, program.durations_us
    if not may_have_streams(facts, options, device):
        return [], None
    assert facts.critical_path_us is not None
    assert facts.total_work_us is not None
    ratio = facts.critical_path_us / facts.total_work_us if facts.total_work_us else 1.0
    if ratio > _WORTH_TRYING:
        return [], f"not tried: the critical path is {ratio:.0%} of all work, so streams cannot pay"
    analysis = program.analysis
    full = analysis.plan(durations_us=times, max_streams=None if limit == "auto" else limit)
    capped = [
        analysis.plan(durations_us=times, max_streams=cap) for cap in _CAPS if limit == "auto" and cap < full[0].streams
    ]
    return [*capped, full], None


def may_compile(options: BuildOptions, device: torch.device) -> list[Kernels]:
    """The kernels that a compiler may make for this device."""
    if options.fuse == "off" or not devices.able(device).compilers:
        return []
    return ["inductor", "epilogues"] if options.fuse == "auto" else ["inductor", "epilogues", "max-autotune"]


def may_have_streams(facts: GraphFacts, options: BuildOptions, device: torch.device) -> bool:
    """Whether several streams are allowed, and there is something to run on them."""
    return devices.able(device).streams and options.streams != 1 and facts.width >= 2


def far_behind(one: MeasuredCandidate, singles: Sequence[MeasuredCandidate]) -> str | None:
    """Why several streams would not make up for the time that a candidate takes on one; None if they may. Kernels that
    are chosen for a full device may be slow by themselves. `singles`: each source on one stream, to which sums over
    several devices add a second one.
    """
    first = min(singles, key=lambda each: each.replay_us)
    if one.source.kernels == "crowded" or one.replay_us <= _FAR_BEHIND * first.replay_us:
        return None
    return f"one stream takes {one.replay_us:.0f} us, and {first.row.name} {first.replay_us:.0f} us"


def eager_far_behind(source: Source, passed: Sequence[MeasuredCandidate]) -> str | None:
    """Why eager's kernels are not worth a try in another layout or over folded weights; None if they may be."""
    given = next((each for each in passed if each.source == AS_GIVEN), None)
    compiled = (each for each in passed if each.source.kernels != "eager")
    best = min(compiled, key=lambda each: each.replay_us, default=None)
    if source.kernels != "eager" or given is None or best is None:
        return None
    if given.replay_us <= _EAGER_FAR_BEHIND * best.replay_us:
        return None
    return f"{given.row.name} takes {given.replay_us:.0f} us, and {best.row.name} {best.replay_us:.0f} us"


def instead_of(source: Source, tried: Collection[Source], pairs: Pairs) -> Source | None:
    """What to try next after a source that does not work; `pairs` are those that fold. None: nothing."""
    if source.kernels == "crowded":
        source = replace(source, kernels="epilogues")
        if source not in tried:
            return source
    plain = replace(source, folded=(), merged=() if source.kernels == "eager" else source.merged)
    if plain not in tried:
        return plain  # folded weights may not fit a narrow type
    if source.kernels == "epilogues" and "inductor" not in {each.kernels for each in tried}:
        return replace(source, kernels="inductor", merged=(), folded=pairs)  # without what is ours
    return None


def few_plans(program: PlannedProgram, plans: Sequence[tuple[Plan, GraphFacts]]) -> list[tuple[Plan, GraphFacts]]:
    """Which plans are worth a capture that takes long, the widest first. `plans` have rising numbers of streams."""
    few = list(plans)
    if few and few[-1][0].streams > _MOST_STREAMS:
        few[-1] = program.analysis.plan(durations_us=program.durations_us, max_streams=_MOST_STREAMS)
    fewer = [planned for planned in reversed(few[:-1]) if planned[0].streams <= _FEWER_STREAMS]
    return [*few[-1:], *fewer][:_MOST_PLANS]


def too_large(programs: Programs, device: torch.device, limit: int | None) -> str | None:
    """Why plans cannot do with `limit` bytes of memory; None if they can."""
    if limit is None:
        return None
    planned = sum(planned_bytes(p.recording.program, p.plan, p.memory, device) for p in programs.values())
    if planned <= limit:
        return None
    workspaces = sum(workspace_bytes(p.recording.program, p.plan, device) for p in programs.values())
    products = f", {workspaces} of them as workspaces of matrix products" if workspaces else ""
    return f"its memory plan needs {planned} bytes{products}, more than the {limit} that it may use"


def capture_several(
    recording: Recording,
    plan: Plan,
    module: nn.Module,
    device: torch.device,
    count: int,
    memory: MemoryPlan | None = None,
    *,
    again: bool = False,
) -> tuple[Instance, ...]:
    """`count` instances of a plan over one module's state. `again`: this thread has captured it before. Raises
    OutOfMemory, EngineError; then none is left.
    """
    memory, state = memory or arena_plan(recording.program, plan), state_of(module)
    made: list[Instance] = []
    try:
        for _ in range(count):
            made.append(  # those made so far must be closed if one fails
                capture(
                    recording.program,
                    plan,
                    state=state,
                    constants=recording.constants,
                    kernels=recording.kernels,
                    device=device,
                    memory=memory,
                    example=None if (made or again) and devices.able(device).graphs else recording.example,
                )
            )
    except BaseException:
        for instance in made:
            instance.close()
        raise
    return tuple(made)
