"""Record a module, capture the plan, check it against eager, measure it: a new schedule."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.bind import bind
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.record import Recording, record, state_of
from nimble_jobs.errors import CannotRecord, CheckFailed
from nimble_jobs.planner.request import Request
from nimble_jobs.schedule import Candidate, Schedule


@dataclass(frozen=True, kw_only=True)
class Built:
    """A new schedule, its instance, and the constants that must be stored beside it."""

    schedule: Schedule
    instance: Instance
    recording: Recording
    failure: str | None  # why the check against eager failed; None where it passed


def build_schedule(module: nn.Module, request: Request, key: str, device: torch.device) -> Built:
    """Build the schedule of a module that lies on `device` already.

    Raises CannotRecord where the model does what no schedule can hold, EngineError where it cannot be captured.
    """
    start = time.perf_counter()
    state = state_of(module)
    example = torch.zeros(request.input_shape, dtype=request.input_dtype, device=device)
    recording = record(module, {"x": example}, state, device, module)
    program = recording.program
    if any(t.random for t in program.tasks):
        source = next(t.source for t in program.tasks if t.random)
        raise CannotRecord(f"the model draws random numbers at {source}; its replays could not be checked")
    plan, _ = graph.single_stream(program)
    graph.check_plan(program, plan)
    instance = capture(program, plan, state=state, constants=recording.constants, device=device)
    tolerance = tolerance_of(request)
    failure: str | None = None
    error: float | None
    try:
        error = check_instance(instance, module, recording, request, device)
    except CheckFailed as e:
        failure, error = str(e), e.error
    inputs = verify.random_inputs(program.inputs, device, seed=0, below=integers_below(module))
    for name, value in inputs.items():
        instance.inputs[name].copy_(value)
    with torch.no_grad():
        eager_us = measure.time_us(lambda: module(*inputs.values()), device)
    replay_us = measure.time_us(instance.replay, device)
    bound = bind(program, plan, state=state, constants=recording.constants, device=device)
    durations = measure.task_times_us(bound, device)
    plan, facts = graph.single_stream(program, durations_us=durations)
    schedule = Schedule(
        key=key,
        program=program,
        plan=plan,
        facts=facts,
        durations_us=tuple(durations),
        candidates=_candidates(request, eager_us, replay_us, instance.bytes, error, failure),
        tolerance=tolerance,
        error=error,
        device=devices.describe(device),
        eager_us=eager_us,
        replay_us=replay_us,
        peak_bytes=instance.bytes,
        build_s=time.perf_counter() - start,
    )
    return Built(schedule=schedule, instance=instance, recording=recording, failure=failure)


def check_instance(
    instance: Instance, module: nn.Module, recording: Recording, request: Request, device: torch.device
) -> float:
    """The relative norm of replays against eager on fresh input. Raises CheckFailed above the tolerance."""
    return verify.check(
        instance,
        module,
        recording.program.inputs,
        device,
        tolerance=tolerance_of(request),
        seed=secrets.randbits(32),
        below=integers_below(module),
    )


def tolerance_of(request: Request) -> float:
    """What the spec asks for, else the default of the model's dtype."""
    asked = request.schedule.tolerance
    return asked if asked is not None else verify.TOLERANCE[request.model.dtype]


def integers_below(module: nn.Module) -> int:
    """A bound on random integers that no embedding of the module can be overrun by."""
    return min((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=2)


def _candidates(
    request: Request, eager_us: float, replay_us: float, nbytes: int, error: float | None, failure: str | None
) -> tuple[Candidate, ...]:
    def rate(us: float) -> float:
        return request.batch_size / us * 1e6

    return (
        Candidate(
            name="eager",
            replay_us=eager_us,
            records_per_s=rate(eager_us),
            peak_bytes=None,
            error=0.0,
            chosen=failure is not None,
            reason="the schedule failed its check" if failure else "the reference that the schedule is checked against",
        ),
        Candidate(
            name="one stream",
            replay_us=replay_us,
            records_per_s=rate(replay_us),
            peak_bytes=nbytes,
            error=error,
            chosen=failure is None,
            reason=failure or "the only schedule that was built",
        ),
    )
