"""Prepares a signature with gradients: its forward pass and its backward are searched, checked and captured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.engine.record import flatten_outputs, state_of
from nimble_jobs.engine.state import Snapshot
from nimble_jobs.engine.step import Step, foreign_leaf, gradient_name, reached
from nimble_jobs.engine.verify import tolerance_for
from nimble_jobs.errors import CannotRecord, UsageError
from nimble_jobs.nimble.flat import Structure, flat
from nimble_jobs.nimble.guard import Choice, Guard, changed_by_calls
from nimble_jobs.nimble.inference import Eager, parts_of
from nimble_jobs.nimble.pair import Pair, Subject
from nimble_jobs.nimble.pair_target import PairTarget
from nimble_jobs.nimble.signature import Signature
from nimble_jobs.nimble.surroundings import refuse_surroundings
from nimble_jobs.nimble.training import Training
from nimble_jobs.nimble.writes import meeting_state, names_written, written_inputs
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.module.limits import integers_below
from nimble_jobs.planner.module.refusals import (
    gradient_hooks_off,
    refuse_backward_hooks,
    refusing_to_prepare,
    watch_steps,
    watched,
)
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.search.candidate import MeasuredCandidate
from nimble_jobs.planner.search.contest import Contest, against_eager, worth_a_contest
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.search.summary import Summary, table
from nimble_jobs.planner.step.request import Tensors
from nimble_jobs.schedule import Candidate, Schedule


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """What the search found, captured, and how it compares with eager."""

    winner: MeasuredCandidate
    candidates: tuple[Candidate, ...]
    stages: tuple[tuple[str, float], ...]
    pair: Pair
    contest: Contest | None
    forward_us: float  # a forward pass in eager
    step_us: float  # both passes in eager


def prepare(
    module: nn.Module,
    signature: Signature,
    tensors: list[torch.Tensor],
    options: BuildOptions,
    device: torch.device,
    guard: Choice = "on",
) -> Training | Eager:
    """Search, check and capture the fastest schedules of a call in training mode and of its backward.

    Raises as `inference.prepare` does, and UsageError for a module in evaluation mode.
    """
    _refuse_beforehand(module, device)
    start = time.perf_counter()
    with (
        restoring_state(module, device),
        gradient_hooks_off(module.parameters()),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        call = flat(module, signature)
        subject = _subject(module, call, signature, tensors, device)
        snapshot = Snapshot(module)
        try:
            given = subject.with_grad(subject.inputs)
            with changed_by_calls(module, training=True) as changed:
                result = watched(snapshot, lambda: call(*given.values()))
            snapshot.refuse_resized()
            structure = Structure.of(result)
            with refusing_to_prepare(device, lambda: subject.step(subject.inputs)):
                subject = _named_apart(subject, structure)
                _refuse_strange_leaves(subject, given, result)
                subject = subject.probed()
                reaches = _reaches(subject, given, flatten_outputs(result))
                del result
                changing = watch_steps(module, lambda: subject.step(subject.inputs), device)
                tolerance = options.tolerance or tolerance_for(module, tensors[0])
                target = PairTarget(call, subject, tolerance, integers_below(module), changing)
                choice = _searched(target, options, call, given)
        finally:
            snapshot.put_back_values()  # of parameters too, which restoring_state leaves alone
    schedule, backward = _schedules(choice, target, options, time.perf_counter() - start)
    if schedule.runs == "eager":
        choice.pair.close()
        return Eager(signature=signature, module=module, schedule=schedule, backward_schedule=backward, training=True)
    return Training(
        signature=signature,
        schedule=schedule,
        backward_schedule=backward,
        structure=structure,
        pair=choice.pair,
        guard=Guard(module, training=True, but_for=frozenset(changed)) if guard == "on" else None,
        parameters=subject.parameters,
        frozen={n: p for n, p in module.named_parameters() if not p.requires_grad},
        input_leaves=subject.input_leaves,
        reached=reaches,
        written=written_inputs(schedule.program),
        meeting=meeting_state(call, schedule.program),
        device=device,
    )


def _refuse_beforehand(module: nn.Module, device: torch.device) -> None:
    if not module.training:
        raise UsageError("training: the module is in evaluation mode; call its train() before prepare")
    refuse_surroundings(device, training=True)
    refuse_backward_hooks(module)


def _subject(
    module: nn.Module, call: nn.Module, signature: Signature, tensors: list[torch.Tensor], device: torch.device
) -> Subject:
    inputs = {s.name: t.detach().clone() for s, t in zip(signature.tensors, tensors, strict=True)}
    return Subject(
        call=call,
        inputs=inputs,
        parameters={n: p for n, p in module.named_parameters() if p.requires_grad},
        input_leaves=tuple(n for n, t in zip(inputs, tensors, strict=True) if t.requires_grad),
        state=state_of(call),
        device=device,
    )


def _searched(target: PairTarget, options: BuildOptions, call: nn.Module, given: Tensors) -> _Choice:
    """The fastest candidate, captured and checked again. Raises CannotRecord, CheckFailed, EngineError, OutOfMemory."""
    subject, search = target.subject, Search(target, options)
    winner = search.timed(search.run())
    _refuse_writes(target.step(winner.source), call, subject)
    forward_us = measure.time_us(lambda: call(*given.values()), target.device)
    step_us = measure.time_us(lambda: subject.step(subject.inputs), target.device)
    pair = target.pair(winner.source, winner.programs)
    try:
        target.check(pair)
        contest = _against_eager(pair, winner, subject, step_us, options)
    except BaseException:
        pair.close()
        raise
    step_us = step_us if contest is None else contest.eager_us
    return _Choice(
        winner=winner,
        candidates=table(search.candidates, winner, eager_us=step_us, records=target.records, contest=contest),
        stages=search.clock.stages,
        pair=pair,
        contest=contest,
        forward_us=forward_us,
        step_us=step_us,
    )


def _against_eager(
    pair: Pair, winner: MeasuredCandidate, subject: Subject, eager_us: float, options: BuildOptions
) -> Contest | None:
    """Both passes in eager and replayed, timed in turns; None if eager may not win, or is slower beyond doubt."""
    if not worth_a_contest(winner.replay_us, eager_us, options):
        return None

    def replay() -> None:
        pair.forward.replay()
        pair.backward.replay()

    return against_eager(lambda: subject.step(subject.inputs), replay, subject.device, eager_us=eager_us, as_given=True)


def _schedules(choice: _Choice, target: PairTarget, options: BuildOptions, build_s: float) -> tuple[Schedule, Schedule]:
    """The schedules of the forward pass and of the backward."""
    summary = Summary(
        winner=choice.winner,
        contest=choice.contest,
        contested=None,
        candidates=choice.candidates,
        tolerance=target.tolerance,
        error=choice.winner.error,
        device=target.device,
        build_s=build_s,
        stages=choice.stages,
        memories={Role.FORWARD: choice.pair.forward.instance.bytes, Role.BACKWARD: choice.pair.backward.bytes},
    )

    def schedule(role: Role, eager_us: float) -> Schedule:
        program = choice.winner.programs[role].recording.program
        parts = parts_of(program, options, target.device) | {"mode": "training"}
        return summary.storable(role, parts, schedule_key(parts), eager_us=eager_us).schedule

    backward_us = max(0.0, choice.step_us - choice.forward_us)
    return schedule(Role.FORWARD, choice.forward_us), schedule(Role.BACKWARD, backward_us)


def _refuse_strange_leaves(subject: Subject, given: Tensors, result: Any) -> None:
    """Raises CannotRecord if autograd would give gradients to tensors that a replay gives none."""
    for name, tensor in given.items():
        if tensor.is_leaf and tensor.requires_grad and name not in subject.input_leaves:
            raise CannotRecord(f"the model makes its input {name!r} require grad; the example did not")
    strange = foreign_leaf(flatten_outputs(result).values(), subject.leaves(given).values())
    if strange is not None:
        raise CannotRecord(
            f"the model's outputs depend on a tensor of shape {list(strange.shape)} that requires grad and is neither "
            "a parameter of the module nor an input; make it an nn.Parameter"
        )


def _named_apart(subject: Subject, structure: Structure) -> Subject:
    """The same with other names for parameters that, or whose gradients, are called like an input or an output."""
    taken, found = {*subject.inputs, *structure.names}, {}
    for name, parameter in subject.parameters.items():
        while name in taken or gradient_name(name) in taken or name in found:
            name = f"module.{name}"
        found[name] = parameter
    return replace(subject, parameters=found)


def _reaches(subject: Subject, given: Tensors, outputs: Tensors) -> dict[str, frozenset[str]]:
    """Names of the gradients that depend on an output's, by the name of the output's gradient."""
    found = {}
    for name, tensor in outputs.items():
        leaves: Iterable[str] = reached(tensor, subject.leaves(given))
        if subject.hides_gradients and tensor.requires_grad:
            _, leaves = subject.step(subject.inputs, {name: torch.ones_like(tensor)})
        found[gradient_name(name)] = frozenset(gradient_name(leaf) for leaf in leaves)
    return found


def _refuse_writes(step: Step, call: nn.Module, subject: Subject) -> None:
    """A step may write buffers; parameters and differentiated inputs it may not."""
    parameters = {name for name, _ in call.named_parameters()}
    for program in (step.forward.program, step.backward.program):
        for name in names_written(program):
            if name in parameters:
                raise CannotRecord(f"the model writes into its parameter {name!r}")
    for name in written_inputs(step.forward.program):
        if name in subject.input_leaves:
            raise CannotRecord(f"the model writes into its input {name!r}, which requires grad")
