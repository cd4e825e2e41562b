"""Forward and backward of one recorded step, captured over the same saved tensors, and checked against eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from nimble_jobs.engine import verify
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.device import able, synchronize
from nimble_jobs.engine.device import seed as seed_all
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.engine.step import GENERATOR, Step, differentiate, gradient_name
from nimble_jobs.errors import CheckFailed
from nimble_jobs.nimble.writes import names_written
from nimble_jobs.planner.step.compare import (
    GRADIENT_SLACK,
    NOISE,
    ROUNDINGS,
    compare,
    compare_gradient,
    copies,
    disturb,
    largest,
    matters,
    near_eager,
    noise_of,
    put,
    rms,
    unit_roundoff,
)
from nimble_jobs.planner.step.request import Tensors
from nimble_jobs.schedule import Plan

_NO_EXAMPLE: Tensors = MappingProxyType({})
_STEPS = 3  # one after another, in a check of a module that changes its own tensors


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained: a function of tensors, and the tensors that need gradients."""

    call: Callable[..., Any]
    inputs: dict[str, torch.Tensor]  # an example
    parameters: dict[str, torch.Tensor]
    input_leaves: tuple[str, ...]  # inputs that require grad
    state: dict[str, torch.Tensor]
    device: torch.device
    hides_gradients: bool = False  # from all but a backward that accumulates, as reentrant checkpoints do

    def with_grad(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Copies of the inputs. Inputs that need a gradient become leaves."""
        return {n: t.detach().clone().requires_grad_(n in self.input_leaves) for n, t in inputs.items()}

    def leaves(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """All tensors that get a gradient, by name."""
        return {**{n: inputs[n] for n in self.input_leaves}, **self.parameters}

    def unit_roundoff(self) -> float:
        """The largest relative error of rounding to the narrowest floating type of parameters and inputs."""
        return unit_roundoff([t.dtype for t in (*self.parameters.values(), *self.inputs.values())], self.device)

    def probed(self) -> Subject:
        """A copy with `hides_gradients` set. Runs two steps in eager to find out, and raises what they raise."""
        _, accumulated = self.step(self.inputs)
        try:
            _, asked = self.step(self.inputs, accumulate=False)
        except RuntimeError:  # what reentrant checkpoints answer
            return replace(self, hides_gradients=True)
        return replace(self, hides_gradients=asked.keys() != accumulated.keys())

    def step(
        self, inputs: Tensors, gradients: Tensors | None = None, *, accumulate: bool = True
    ) -> tuple[Tensors, Tensors]:
        """Outputs and gradients in eager, given the gradients of some outputs; ones by default."""
        given = self.with_grad(inputs)
        leaves = self.leaves(given)
        with torch.enable_grad():
            outputs = flatten_outputs(self.call(*given.values()))
        wanted = gradients or {n: torch.ones_like(t) for n, t in outputs.items() if t.requires_grad}
        return outputs, differentiate(outputs, leaves, wanted, accumulate=accumulate)


class Forward:
    """A captured forward pass, and the tensors that it saves for the backward pass, at fixed addresses."""

    def __init__(self, step: Step, plan: Plan, subject: Subject) -> None:
        device = subject.device
        self.ports = step.forward.program.inputs
        generator = torch.zeros(1, dtype=torch.uint8, device=device)
        state = {**subject.state, GENERATOR: generator}
        self.instance = _capture(step.forward, plan, state, device, subject.inputs)
        self._twins: dict[str, torch.Tensor] = {}
        self.saved: dict[str, torch.Tensor] = {}
        for name, source in step.saved.items():
            if source in self.instance.inputs:
                self.saved[name] = self.instance.inputs[source]
            elif not able(device).graphs:  # each replay makes its outputs anew
                self.saved[name] = self._twins[source] = _twin(self.instance.outputs[source])
            else:
                self.saved[name] = self.instance.outputs[source]
        self.replay()  # a backward may index by what is saved: it must never see bytes that nobody wrote

    def replay(self) -> None:
        self.instance.replay()
        for source, twin in self._twins.items():
            _bytes(twin).copy_(_bytes(self.instance.outputs[source]))


class Pair:
    """Both captured passes. A backward replay belongs to the latest forward replay."""

    def __init__(self, step: Step, forward: Plan, backward: Plan, subject: Subject) -> None:
        self.step = step
        self.forward = Forward(step, forward, subject)
        try:
            self.backward = capture_backward(step, backward, self.forward, subject)
        except BaseException:
            self.forward.instance.close()
            raise

    def close(self) -> None:
        self.backward.close()
        self.forward.instance.close()


def capture_backward(step: Step, plan: Plan, forward: Forward, subject: Subject) -> Instance:
    """The backward pass over what `forward` saves."""
    return _capture(step.backward, plan, {**subject.state, **forward.saved}, subject.device)


def check(
    pair: Pair,
    subject: Subject,
    *,
    tolerance: float,
    seed: int,
    below: int,
    integers: Tensors,
    changing: Tensors,
) -> float:
    """Compare outputs, gradients and what a step changes with eager on fresh input; the largest relative norm found.

    `changing` are the module's tensors that steps in eager change. Where there are any, several steps are taken one
    after another, in eager and by replays, from the same start. Random masks are compared too: both sides draw from the
    same seed. Raises CheckFailed, naming the tensor.
    """
    step, device = pair.step, subject.device
    changing = {**{n: subject.state[n] for n in written_state(step)}, **changing}
    before = copies(changing)
    worst = 0.0
    for turn in range(verify.ROUNDS):
        drawn = []
        for i in range(_STEPS if changing else 1):
            number = seed + turn + i * verify.ROUNDS
            inputs = verify.random_inputs(step.forward.program.inputs, device, number, below, integers)
            made = verify.random_inputs(step.backward.program.inputs, device, seed - turn - 1 - i * verify.ROUNDS)
            drawn.append((inputs, made, number))
        try:
            expected = [_in_eager(subject, step, changing, *each) for each in drawn]
            put(changing, before)
            inputs, made, number = drawn[0]
            noise = _noise(subject, inputs, _given(step, made), expected[0][1], number)
            put(changing, before)
            start: Tensors = before
            for (inputs, made, number), right in zip(drawn, expected, strict=True):
                seed_all(number, device)
                verify.poison(pair.forward.instance)
                verify.poison(pair.backward)
                put(pair.forward.instance.inputs, inputs)
                put(pair.backward.inputs, made)
                pair.forward.replay()
                pair.backward.replay()
                synchronize(device)
                outputs, gradients, after = right
                for found, wanted in ((pair.forward.instance.outputs, outputs), (changing, after)):
                    for name, tensor in wanted.items():
                        worst = max(worst, compare(name, found[name], tensor, tolerance, 0.0))
                try:
                    error = _compared(pair, gradients, tolerance, noise)
                except CheckFailed as refused:
                    near = partial(_disturbed, subject, inputs, _given(step, made), seed=number)
                    error = _near(refused, pair, subject, near, changing, start, tolerance)
                worst = max(worst, error)
                start = after
        finally:
            put(changing, before)
    return worst


def _in_eager(
    subject: Subject, step: Step, changing: Tensors, inputs: Tensors, made: Tensors, seed: int
) -> tuple[Tensors, Tensors, Tensors]:
    """Outputs, gradients, and what a step leaves in the module."""
    seed_all(seed, subject.device)
    outputs, gradients = subject.step(inputs, _given(step, made))
    return copies(outputs), gradients, copies(changing)


def _given(step: Step, made: Tensors) -> Tensors:
    """The gradients of outputs, by the outputs' names."""
    return {n: made[gradient_name(n)] for n in step.differentiable}


def _compared(pair: Pair, gradients: Tensors, tolerance: float, noise: Mapping[str, float]) -> float:
    """The largest relative norm in the gradients of the last replay. Raises CheckFailed, naming the one that differs
    most.
    """
    if set(gradients) != set(pair.step.leaves):
        raise CheckFailed(f"gradients of {sorted(set(gradients) ^ set(pair.step.leaves))} exist in some calls only")
    floor, slack = NOISE * max((rms(g) for g in gradients.values()), default=0.0), tolerance * GRADIENT_SLACK

    def norm(name: str) -> float:
        said = gradient_name(name)
        found = pair.backward.outputs[said]
        return compare_gradient(said, found, gradients[name], slack, floor, noise.get(name, 0.0))

    return largest(partial(norm, name) for name in gradients)


def _noise(subject: Subject, inputs: Tensors, gradients: Tensors, expected: Tensors, seed: int) -> dict[str, float]:
    """How far rounding alone moves each gradient: relative norms by leaf. The parameters stay as they are."""
    unit = subject.unit_roundoff()
    if not matters(unit):
        return {}
    found = _disturbed(subject, inputs, gradients, unit, seed, seed=seed)
    return noise_of({n: g for n, g in found.items() if n in expected}, expected)


def _near(
    refused: CheckFailed,
    pair: Pair,
    subject: Subject,
    disturbed: Callable[[float, int], Tensors],
    changing: Tensors,
    start: Tensors,  # what was in `changing` before the step
    tolerance: float,
) -> float:
    """As `near_eager`, for the gradients of the last replay, whose state stays in `changing`."""
    unit = subject.unit_roundoff()
    if matters(unit):
        raise refused
    replayed = copies(changing)

    def neighbour(number: int) -> float:
        put(changing, start)
        return _compared(pair, disturbed(ROUNDINGS * unit, number), tolerance, {})

    try:
        return near_eager(refused, neighbour)
    finally:
        put(changing, replayed)


def _disturbed(
    subject: Subject, inputs: Tensors, gradients: Tensors, unit: float, draw: int, *, seed: int
) -> dict[str, torch.Tensor]:
    """Gradients in eager for parameters and inputs that are disturbed by `unit`. The parameters stay as they are."""
    parameters = dict(subject.parameters)
    before, other = copies(parameters), copies(inputs)
    try:
        disturb([*parameters.values(), *other.values()], unit, draw)
        seed_all(seed, subject.device)
        return dict(subject.step(other, gradients)[1])
    finally:
        put(parameters, before)


def written_state(step: Step) -> list[str]:
    """Names of the module's tensors that a step writes, such as running statistics."""
    names: dict[str, None] = {}
    for program in (step.forward.program, step.backward.program):
        names |= dict.fromkeys(names_written(program))
    return [name for name in names if not name.startswith("@")]


def _capture(
    recording: Any, plan: Plan, state: Tensors, device: torch.device, example: Tensors = _NO_EXAMPLE
) -> Instance:
    return capture(
        recording.program,
        plan,
        state=state,
        constants=recording.constants,
        kernels=recording.kernels,
        device=device,
        example=example,
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same offset, shape and strides, over a copy of the storage."""
    storage = _bytes(tensor).clone().untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
