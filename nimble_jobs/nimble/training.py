"""One prepared signature with gradients: the forward replays when it is called, the backward when gradients arrive."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.engine.record import flatten_outputs, state_of
from nimble_jobs.engine.state import Snapshot
from nimble_jobs.engine.step import Step, foreign_leaf, gradient_name, reached
from nimble_jobs.errors import CannotRecord, EngineError, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.nimble.flat import Structure, flat
from nimble_jobs.nimble.guard import Choice, Guard, changed_by_calls
from nimble_jobs.nimble.inference import Eager, parts_of
from nimble_jobs.nimble.pair import Pair, Subject
from nimble_jobs.nimble.pair_target import PairTarget
from nimble_jobs.nimble.signature import Signature
from nimble_jobs.nimble.surroundings import Unfit, refuse_surroundings
from nimble_jobs.nimble.writes import meeting_state, names_written, refuse_shared, written_inputs
from nimble_jobs.planner.forward.build import tolerance_for
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.module.hooks import gradient_hooks_off, refuse_backward_hooks
from nimble_jobs.planner.module.limits import integers_below
from nimble_jobs.planner.module.refusals import refusing_to_prepare
from nimble_jobs.planner.module.restoring import no_traces
from nimble_jobs.planner.module.watch import watch_steps, watched
from nimble_jobs.planner.search.candidate import Found
from nimble_jobs.planner.search.contest import Contest, against_eager, worth_a_contest
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.search.summary import Summary, table
from nimble_jobs.planner.step.compare import Tensors
from nimble_jobs.schedule import Schedule


@dataclass(kw_only=True)
class Training:
    """Schedules of both passes over shared memory: a backward belongs to the forward just before it."""

    signature: Signature
    schedule: Schedule
    backward_schedule: Schedule
    structure: Structure
    pair: Pair
    guard: Guard | None
    parameters: dict[str, torch.Tensor]  # those that get gradients
    frozen: dict[str, torch.Tensor]  # and those that do not
    input_leaves: tuple[str, ...]
    reached: dict[str, frozenset[str]]  # gradients that depend on an output's, by the name of the output's gradient
    written: tuple[str, ...]  # inputs that the model writes into
    meeting: dict[str, torch.Tensor]  # the module's own tensors that inputs must not share memory with
    device: torch.device
    training = True
    fallback = None
    hit = Hit.MISS

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._spent = 0  # the call whose saved tensors the backward has written into
        self._consumes = bool(names_written(self.pair.step.backward.program))
        # What a replay writes cannot be taken back, and on a CPU nothing is gained by asking afterwards.
        program = self.pair.step.forward.program
        self._asks_first = self.device.type == "cpu" or bool(self.written or names_written(program))
        self._token = torch.empty(0)
        self._leaves = [gradient_name(s.name) for s in self.signature.tensors] + [
            gradient_name(n) for n in self.parameters
        ]
        self._done = torch.cuda.Event() if self.device.type == "cuda" else None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {**self.pair.forward.instance.inputs, **self.pair.backward.inputs}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        forward = self.pair.forward.instance.outputs
        return {**{n: forward[n] for n in self.structure.names}, **self.pair.backward.outputs}

    def replay(self) -> None:
        self._calls += 1
        self.pair.forward.replay()
        self.pair.backward.replay()

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The model's outputs for these inputs, part of autograd's graph.

        Raises UsageError as `refuse_shared`, Unfit where autograd would want what no replay has, ModuleChanged.
        """
        refuse_shared(self.signature, tensors, self.written, self.meeting)
        if torch.is_grad_enabled():
            for slot, tensor in zip(self.signature.tensors, tensors, strict=True):
                if tensor.requires_grad and slot.name not in self.input_leaves:
                    raise Unfit(f"{slot.name}: requires grad; the example that was prepared did not")
            for name, parameter in self.frozen.items():
                if parameter.requires_grad:
                    raise Unfit(f"the parameter {name!r} requires grad; it did not when it was prepared")
        if self.guard is not None and self._asks_first:
            self.guard.check()
        outputs = _Replay.apply(self, *tensors, *self.parameters.values())  # type: ignore[no-untyped-call]
        if self.guard is not None and not self._asks_first:
            self.guard.check()  # a GPU is at work meanwhile
        return self.structure.build(list(outputs))

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[int, list[torch.Tensor]]:
        """Number of this call, and outputs of its own."""
        instance = self.pair.forward.instance
        with self._lock:
            self._begin()
            for static, given in zip(instance.inputs.values(), tensors, strict=True):
                static.copy_(given)
            self.pair.forward.replay()
            self._calls += 1
            own = [instance.outputs[name].clone() for name in self.structure.names]
            for slot, given in zip(self.signature.tensors, tensors, strict=True):
                if slot.name in self.written:
                    given.copy_(instance.inputs[slot.name])
            self._end()
            call = self._calls
        return call, own

    def backward(self, call: int, gradients: dict[str, torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of their own, of inputs and parameters; None for what the outputs do not depend on."""
        instance = self.pair.backward
        with self._lock:
            if call != self._calls:
                raise EngineError(
                    "the module was called again before this backward, and what the earlier call saved is gone; "
                    "call backward before the next forward"
                )
            if self._consumes and self._spent == call:
                raise EngineError("a second backward of one call cannot be replayed: the first changed what was saved")
            self._spent = call
            self._begin()
            for name, static in instance.inputs.items():
                given = gradients[name]
                if given is None:
                    static.zero_()
                else:
                    static.copy_(given)
            instance.replay()
            found = {n: t for n, t in instance.outputs.items() if n in self._leaves}
            fresh = {n: torch.empty_like(t) for n, t in found.items()}
            torch._foreach_copy_(list(fresh.values()), list(found.values()))
            self._end()
        given_for = {leaf for name, leaves in self.reached.items() if gradients[name] is not None for leaf in leaves}
        return [fresh.get(name) if name in given_for else None for name in self._leaves]

    def flowing(self, needed: tuple[bool, ...]) -> tuple[str, ...]:
        """Names of the outputs that require grad, where these inputs and parameters do."""
        differentiable = self.pair.step.differentiable
        if all(needed):
            return differentiable
        wanted = {name for name, needs in zip(self._leaves, needed, strict=True) if needs}
        return tuple(name for name in differentiable if self.reached[gradient_name(name)] & wanted)

    def versions(self) -> int:
        """Grows whenever a parameter is changed in place."""
        return sum(p._version for p in (*self.parameters.values(), *self.frozen.values()))

    def close(self) -> None:
        self._calls += 1
        self.pair.close()

    def _begin(self) -> None:
        if self._done is not None:  # what came before may have been launched on another stream
            torch.cuda.current_stream(self.device).wait_event(self._done)

    def _end(self) -> None:
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.device))


class _Replay(torch.autograd.Function):
    """Both passes as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, training: Training, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = tensors[: len(training.signature.tensors)]
        ctx.training = training
        ctx.versions = training.versions()
        ctx.call, outputs = training.forward(inputs)
        ctx.save_for_backward(training._token)  # lets autograd notice a second backward, as it does in eager
        ctx.set_materialize_grads(False)
        ctx.inputs = [weakref.ref(t) for t in inputs if t.requires_grad]
        flowing = training.flowing(ctx.needs_input_grad[1:])
        names = training.structure.names
        ctx.mark_non_differentiable(*(t for n, t in zip(names, outputs, strict=True) if n not in flowing))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  # raises where they were freed
        training: Training = ctx.training
        if training.versions() != ctx.versions:
            raise EngineError("a parameter was changed in place between forward and backward")
        if torch.is_autocast_enabled(training.device.type):
            raise UsageError("backward was called under torch.autocast, which a schedule knows nothing of")
        names = (gradient_name(n) for n in training.structure.names)
        with torch.no_grad():
            found = training.backward(ctx.call, dict(zip(names, gradients, strict=True)))
        if torch.is_grad_enabled():  # with create_graph=True
            given = *gradients, *(ref() for ref in ctx.inputs), *training.parameters.values()
            behind = [t for t in given if t is not None and t.requires_grad]
            found = list(_Once.apply(len(behind), *behind, *found))  # type: ignore[no-untyped-call]
        return None, *found


class _Once(torch.autograd.Function):
    """Passes gradients on, and refuses to be differentiated: a schedule holds first derivatives."""

    @staticmethod
    def forward(ctx: Any, behind: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients after the first tensors, which they depend on."""
        return tuple(None if g is None else g.view_as(g) for g in tensors[behind:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise EngineError(
            "a second derivative (create_graph=True) was asked of a replay, which holds first ones; "
            "call the module itself where gradients are differentiated"
        )


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
    if not module.training:
        raise UsageError("training: the module is in evaluation mode; call its train() before prepare")
    refuse_surroundings(device, training=True)
    refuse_backward_hooks(module)
    start = time.perf_counter()
    inputs = {s.name: t.detach().clone() for s, t in zip(signature.tensors, tensors, strict=True)}
    with (
        no_traces(module, device),
        gradient_hooks_off(module.parameters()),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        call = flat(module, signature)
        subject = Subject(
            call=call,
            inputs=inputs,
            parameters={n: p for n, p in module.named_parameters() if p.requires_grad},
            input_leaves=tuple(n for n, t in zip(inputs, tensors, strict=True) if t.requires_grad),
            state=state_of(call),
            device=device,
        )
        snapshot = Snapshot(module)
        try:
            given = subject.with_grad(subject.inputs)
            with changed_by_calls(module, training=True) as changed:
                result = watched(snapshot, lambda: call(*given.values()))
            snapshot.refuse_resized()
            structure = Structure.of(result)
            with refusing_to_prepare(device, lambda: subject.step(subject.inputs)):
                subject = replace(subject, parameters=_named_apart(subject.parameters, {*inputs, *structure.names}))
                _refuse_strange_leaves(subject, given, result)
                subject = subject.probed()
                reaches = _reaches(subject, given, flatten_outputs(result))
                del result
                changing = watch_steps(module, lambda: subject.step(subject.inputs), device)
                target = PairTarget(
                    call,
                    subject,
                    tolerance=options.tolerance or tolerance_for(module, tensors[0]),
                    below=integers_below(module),
                    changing=changing,
                )
                search = Search(target, options)
                found = search.run()
                _refuse_writes(target.step(found.source), call, subject)
                forward_us = measure.time_us(lambda: call(*given.values()), device)
                step_us = measure.time_us(lambda: subject.step(subject.inputs), device)
                pair = target.pair(found.source, found.programs)
                try:
                    target.check(pair)
                    contest = _against_eager(pair, found, subject, step_us, options)
                except BaseException:
                    pair.close()
                    raise
        finally:
            snapshot.put_back_values()  # of parameters too, which no_traces leaves alone
    step_us = step_us if contest is None else contest.eager_us
    summary = Summary(
        found=found,
        contest=contest,
        contested=None,
        candidates=table(search.candidates, found, eager_us=step_us, records=target.records, contest=contest),
        tolerance=target.tolerance,
        error=found.error,
        device=device,
        build_s=time.perf_counter() - start,
        stages=search.clock.stages,
        memories={Role.FORWARD: pair.forward.instance.bytes, Role.BACKWARD: pair.backward.bytes},
    )
    eager_us = {Role.FORWARD: forward_us, Role.BACKWARD: max(0.0, step_us - forward_us)}
    schedule, backward = (_schedule(summary, role, options, eager_us[role]) for role in target.runs)
    if summary.stays_eager:
        pair.close()
        return Eager(signature=signature, module=module, schedule=schedule, backward_schedule=backward, training=True)
    return Training(
        signature=signature,
        schedule=schedule,
        backward_schedule=backward,
        structure=structure,
        pair=pair,
        guard=Guard(module, training=True, but_for=frozenset(changed)) if guard == "on" else None,
        parameters=subject.parameters,
        frozen={n: p for n, p in module.named_parameters() if not p.requires_grad},
        input_leaves=subject.input_leaves,
        reached=reaches,
        written=written_inputs(schedule.program),
        meeting=meeting_state(call, schedule.program),
        device=device,
    )


def _against_eager(
    pair: Pair, found: Found, subject: Subject, eager_us: float, options: BuildOptions
) -> Contest | None:
    """Both passes in eager and replayed, timed in turns; None if eager may not win, or is slower beyond doubt."""
    if not worth_a_contest(found.replay_us, eager_us, options):
        return None

    def replay() -> None:
        pair.forward.replay()
        pair.backward.replay()

    return against_eager(lambda: subject.step(subject.inputs), replay, subject.device, eager_us=eager_us, as_given=True)


def _schedule(summary: Summary, role: Role, options: BuildOptions, eager_us: float) -> Schedule:
    """The schedule of one pass."""
    program = summary.found.programs[role].recording.program
    parts = parts_of(program, options, summary.device) | {"mode": "training"}
    return summary.storable(role, parts, schedule_key(parts), eager_us=eager_us).schedule


def _refuse_strange_leaves(subject: Subject, given: Tensors, result: Any) -> None:
    """Raises CannotRecord where autograd would give gradients to tensors that a replay gives none."""
    for name, tensor in given.items():
        if tensor.is_leaf and tensor.requires_grad and name not in subject.input_leaves:
            raise CannotRecord(f"the model has its input {name!r} require grad; the example did not")
    strange = foreign_leaf(flatten_outputs(result).values(), subject.leaves(given).values())
    if strange is not None:
        raise CannotRecord(
            f"the model's outputs depend on a tensor of shape {list(strange.shape)} that requires grad and is neither "
            "a parameter of the module nor an input; make it an nn.Parameter"
        )


def _named_apart(parameters: Tensors, taken: set[str]) -> dict[str, torch.Tensor]:
    """Parameters by names under which neither they nor their gradients are mistaken for what is called `taken`."""
    found = {}
    for name, parameter in parameters.items():
        while name in taken or gradient_name(name) in taken or name in found:
            name = f"module.{name}"
        found[name] = parameter
    return found


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
