"""A forward pass with its backward, for `Nimble`, as what the search works on."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType

import torch
from torch import nn

from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.inductor import compile_module, refusing_compilers
from nimble_jobs.engine.record import Recording
from nimble_jobs.engine.step import GENERATOR, Step, record_step
from nimble_jobs.graph import single_stream
from nimble_jobs.nimble.pair import Forward, Pair, Subject, capture_backward, check
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.search.plans import durations_us
from nimble_jobs.planner.search.target import Programs
from nimble_jobs.planner.sources.source import AS_GIVEN, Kernels, Source
from nimble_jobs.planner.step.request import Tensors
from nimble_jobs.schedule import COMPILERS, Plan


class PairTarget:
    """Both passes of a module. What a backward reads, the forward before it has saved."""

    runs: Mapping[Role, int] = MappingProxyType({Role.FORWARD: 1, Role.BACKWARD: 1})
    first = AS_GIVEN
    must_agree = True
    captures_take_long = True
    available_bytes = None

    def __init__(self, module: nn.Module, subject: Subject, tolerance: float, below: int, changing: Tensors) -> None:
        """`changing`: tensors of the module that steps in eager change."""
        self.subject = subject
        self.device = subject.device
        self.tolerance = tolerance
        self._module = module
        self._below = below
        self._changing = changing
        self._integers = {n: t for n, t in subject.inputs.items() if not (t.is_floating_point() or t.is_complex())}
        self._steps: dict[Source, Step] = {}
        first = next(iter(subject.inputs.values()))
        self.records = first.shape[0] if first.dim() else 1

    def step(self, source: Source) -> Step:
        """What was recorded of a source."""
        return self._steps[source]

    def further(self, first: Programs, kernels: Sequence[Kernels]) -> list[Source]:
        return [Source(kernels=each, layout="given") for each in kernels if each in COMPILERS - {"epilogues"}]

    def use(self, source: Source) -> None:
        """Weights stay where they lie."""

    def record(self, source: Source) -> Iterator[tuple[Role, Recording]]:
        step = self._steps[source] = self._recorded(source)
        yield Role.FORWARD, step.forward
        yield Role.BACKWARD, step.backward

    def _recorded(self, source: Source) -> Step:
        subject, call = self.subject, self.subject.call
        if source.compiled:
            call = compile_module(self._module, max_autotune=source.kernels == "max-autotune", eager_random=True)
        inputs = subject.with_grad(subject.inputs)
        with refusing_compilers("the backward pass") if source.compiled else nullcontext():
            return record_step(
                call,
                inputs,
                subject.leaves(inputs),
                subject.state,
                subject.device,
                module=self._module,
                compiled=source.compiled,
                accumulate=subject.hides_gradients,
            )

    def task_times_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> tuple[float, ...]:
        if role is Role.FORWARD:
            generator = torch.zeros(1, dtype=torch.uint8, device=self.device)
            return self._times_us(recording, plan, {GENERATOR: generator})
        with self._forward(source) as forward:
            return self._times_us(recording, plan, forward.saved)

    def _times_us(self, recording: Recording, plan: Plan, beside: Tensors) -> tuple[float, ...]:
        state = {**self.subject.state, **beside}
        return durations_us(recording, plan, state, self.device, self._below, self._integers)

    @contextmanager
    def _forward(self, source: Source, plan: Plan | None = None) -> Iterator[Forward]:
        """A captured forward pass that has run on fresh input, by default on one stream."""
        step = self._steps[source]
        forward = Forward(step, plan or single_stream(step.forward.program)[0], self.subject)
        try:
            self._fill(forward)
            yield forward
        finally:
            forward.instance.close()

    def _fill(self, forward: Forward) -> None:
        fresh = verify.random_inputs(forward.ports, self.device, 0, self._below, self._integers)
        for name, value in fresh.items():
            forward.instance.inputs[name].copy_(value)
        forward.replay()

    def capture(self, source: Source, programs: Programs) -> CapturedPair:
        return CapturedPair(self, self.pair(source, programs))

    def pair(self, source: Source, programs: Programs) -> Pair:
        """Both passes captured. Raises EngineError, OutOfMemory."""
        step = self._steps[source]
        return Pair(step, programs[Role.FORWARD].plan, programs[Role.BACKWARD].plan, self.subject)

    def check(self, pair: Pair) -> float:
        """The largest relative norm of a difference from eager. Raises CheckFailed."""
        return check(
            pair,
            self.subject,
            tolerance=self.tolerance,
            seed=secrets.randbits(31),
            below=self._below,
            integers=self._integers,
            changing=self._changing,
        )

    def times_us(self, pair: Pair) -> dict[Role, float]:
        """The time of a replay of each pass."""
        self._fill(pair.forward)
        return {
            Role.FORWARD: measure.time_us(pair.forward.replay, self.device),
            Role.BACKWARD: measure.time_us(pair.backward.replay, self.device),
        }

    def alone_us(self, source: Source, role: Role, recording: Recording, plan: Plan) -> float:
        if role is Role.FORWARD:
            with self._forward(source, plan) as forward:
                return measure.time_us(forward.instance.replay, self.device)
        with self._forward(source) as forward:
            backward = capture_backward(self._steps[source], plan, forward, self.subject)
            try:
                return measure.time_us(backward.replay, self.device)
            finally:
                backward.close()


class CapturedPair:
    """Both passes over the module's live state."""

    def __init__(self, target: PairTarget, pair: Pair) -> None:
        self._target = target
        self._pair = pair

    @property
    def bytes(self) -> int:
        return self._pair.forward.instance.bytes + self._pair.backward.bytes

    def check(self, *, thorough: bool) -> float:
        return self._target.check(self._pair)

    def times_us(self) -> dict[Role, float]:
        return self._target.times_us(self._pair)

    def close(self) -> None:
        self._pair.close()
