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
    GradientDiffers,
    compare,
    compare_gradient,
    copies,
    disturb,
    matters,
    noise_of,
    put,
    rms,
    unit_roundoff,
)
from nimble_jobs.planner.step.request import Tensors
from nimble_jobs.planner.step.turns import MOST_TURNS, confirm, in_turns
from nimble_jobs.schedule import Plan

_NO_EXAMPLE: Tensors = MappingProxyType({})
_STEPS = 3  # one after another, in a check of a module that changes its own tensors
Drawn = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]  # inputs of both passes, and the seed of masks


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
    changing = {**{n: subject.state[n] for n in written_state(pair.step)}, **changing}
    before = copies(changing)
    fresh = partial(verify.random_inputs, device=subject.device)
    rough = matters(_unit(subject))

    def turn(number: int) -> float:
        drawn: list[Drawn] = []
        for i in range(_STEPS if changing else 1):
            own = seed + number + i * MOST_TURNS
            inputs = fresh(pair.step.forward.program.inputs, seed=own, below=below, integers=integers)
            made = fresh(pair.step.backward.program.inputs, seed=seed - number - 1 - i * MOST_TURNS)
            drawn.append((inputs, made, own))
        try:
            expected = [_in_eager(subject, pair.step, changing, *each) for each in drawn]
            put(changing, before)
            noise = _noise(subject, pair.step, drawn[0], expected[0][1]) if rough else {}
            put(changing, before)
            return max(
                _replayed(pair, subject, each, right, changing, tolerance, noise)
                for each, right in zip(drawn, expected, strict=True)
            )
        finally:
            put(changing, before)

    return max(in_turns(turn, rough=rough))


def _replayed(
    pair: Pair,
    subject: Subject,
    drawn: Drawn,
    right: tuple[Tensors, Tensors, Tensors],
    changing: Tensors,
    tolerance: float,
    noise: Mapping[str, float],
) -> float:
    """The largest relative norm of what replays of both passes give. Raises CheckFailed, naming the tensor."""
    inputs, made, number = drawn
    before = copies(changing)

    def replayed() -> float:
        put(changing, before)
        seed_all(number, subject.device)
        verify.poison(pair.forward.instance)
        verify.poison(pair.backward)
        put(pair.forward.instance.inputs, inputs)
        put(pair.backward.inputs, made)
        pair.forward.replay()
        pair.backward.replay()
        synchronize(subject.device)
        return _compared(pair, right, changing, tolerance, noise)

    try:
        return replayed()
    except GradientDiffers as e:
        confirm(e, replayed)
        raise


def _in_eager(
    subject: Subject, step: Step, changing: Tensors, inputs: Tensors, made: Tensors, seed: int
) -> tuple[Tensors, Tensors, Tensors]:
    """Outputs, gradients, and what a step leaves in the module."""
    seed_all(seed, subject.device)
    outputs, gradients = subject.step(inputs, _given(step, made))
    return copies(outputs), gradients, copies(changing)


def _compared(
    pair: Pair,
    right: tuple[Tensors, Tensors, Tensors],
    changing: Tensors,
    tolerance: float,
    noise: Mapping[str, float],
) -> float:
    """The largest relative norm of what both replays gave. Raises CheckFailed, naming the tensor."""
    outputs, gradients, state = right
    worst = 0.0
    for found, expected in ((pair.forward.instance.outputs, outputs), (changing, state)):
        for name, tensor in expected.items():
            worst = max(worst, compare(name, found[name], tensor, tolerance, 0.0))
    if set(gradients) != set(pair.step.leaves):
        raise CheckFailed(f"gradients of {sorted(set(gradients) ^ set(pair.step.leaves))} exist in some calls only")
    floor, slack = NOISE * max((rms(g) for g in gradients.values()), default=0.0), tolerance * GRADIENT_SLACK
    for name, tensor in gradients.items():
        found_here = pair.backward.outputs[gradient_name(name)]
        worst = max(
            worst, compare_gradient(gradient_name(name), found_here, tensor, slack, floor, noise.get(name, 0.0))
        )
    return worst


def _unit(subject: Subject) -> float:
    tensors = (*subject.parameters.values(), *subject.inputs.values())
    return unit_roundoff([t.dtype for t in tensors], subject.device)


def _noise(subject: Subject, step: Step, drawn: Drawn, expected: Tensors) -> dict[str, float]:
    """How far rounding alone moves each gradient: relative norms by leaf. The parameters stay as they are."""
    inputs, made, seed = drawn
    parameters = dict(subject.parameters)
    before, other = copies(parameters), copies(inputs)
    try:
        disturb([*parameters.values(), *other.values()], _unit(subject), seed)
        seed_all(seed, subject.device)
        _, found = subject.step(other, _given(step, made))
    finally:
        put(parameters, before)
    return noise_of({n: g for n, g in found.items() if n in expected}, expected)


def _given(step: Step, made: Tensors) -> dict[str, torch.Tensor]:
    """The gradients of the outputs, by output."""
    return {n: made[gradient_name(n)] for n in step.differentiable}


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
