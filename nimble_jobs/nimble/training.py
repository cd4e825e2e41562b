"""One prepared signature with gradients: the forward replays when it is called, the backward when gradients arrive."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.engine.private.operators import copy_
from nimble_jobs.engine.private.tensors import version
from nimble_jobs.engine.step import gradient_name
from nimble_jobs.errors import EngineError, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.nimble.flat import Structure
from nimble_jobs.nimble.guard import Guard
from nimble_jobs.nimble.pair import Pair
from nimble_jobs.nimble.signature import Signature
from nimble_jobs.nimble.surroundings import Unfit
from nimble_jobs.nimble.writes import names_written, refuse_shared
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
        self._asks_first = not able(self.device).asynchronous or bool(self.written or names_written(program))
        self._token = torch.empty(0)
        self._leaves = [gradient_name(s.name) for s in self.signature.tensors] + [
            gradient_name(n) for n in self.parameters
        ]
        self._done = torch.cuda.Event() if able(self.device).streams else None

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

        Raises UsageError as `refuse_shared`, Unfit if autograd would want what no replay has, ModuleChanged.
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
                    "the module was called again before this backward, which overwrote what the earlier call saved; "
                    "call backward before the next forward"
                )
            if self._consumes and self._spent == call:
                raise EngineError("backward can be replayed only once for each call: it overwrites what the call saved")
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
            copy_(list(fresh.values()), list(found.values()))
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
        return sum(version(p) for p in (*self.parameters.values(), *self.frozen.values()))

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
            raise UsageError("backward was called under torch.autocast, which a schedule does not take into account")
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
            "create_graph=True needs second derivatives, which a replay does not compute; "
            "call the module itself to differentiate gradients"
        )
