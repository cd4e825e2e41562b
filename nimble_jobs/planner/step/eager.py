"""A training step in eager: the arithmetic that schedules are recorded from, checked against, and replaced by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from nimble_jobs.engine.contents import state_of
from nimble_jobs.engine.private.modes import as_if_compiled
from nimble_jobs.engine.private.operators import add_, zero_
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.engine.state import writable
from nimble_jobs.engine.step import differentiate
from nimble_jobs.models.packed import Packed
from nimble_jobs.models.scores import scores_among
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.step.counters import Counters
from nimble_jobs.planner.step.optimizer import Optimizer, Update, laid_out_as, load_state
from nimble_jobs.planner.step.reduction import Peers, Reduction
from nimble_jobs.planner.step.request import StepRequest, Tensors
from nimble_jobs.schedule import Schedule


class TrainingStep(Protocol):
    """Trains a module batch by batch. Weights live in the module, everything else that outlasts a step in here."""

    schedule: Schedule | None  # of the batches that end with an update; its `runs` may say that eager is faster
    schedules: Mapping[Role, Schedule]
    fallback: str | None  # why steps run in eager; None if they replay a schedule, or eager is faster

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Static tensors x and y that `run` copies its batch into."""

    @property
    def loss(self) -> torch.Tensor:
        """Mean loss of the last batch, fp32, zero-dimensional, on the device; overwritten by the next run."""

    @property
    def correct(self) -> torch.Tensor:
        """How many of the last batch were classified right, int64; 0 if the labels are no classes."""

    @property
    def found_inf(self) -> torch.Tensor:
        """Whether the last update was skipped because of a gradient that is not finite, bool; only in fp16."""

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of all gradients at the last update, before they were clipped; None if nothing is clipped."""

    def weigh(self, share: float) -> None:
        """Say which share of the next batch's records is this rank's. Without other ranks it is not asked."""

    def sit_out(self, lr: float, last_of_accumulation: bool = True) -> None:
        """Take part in a batch of which this rank has no records, and whose weight is therefore 0."""

    def join(self, peers: Peers) -> None:
        """Train together with the other ranks from now on. All ranks call this, inside `collectives.together`.

        Raises NoJointReplay on all ranks if the step cannot be captured, or if what was captured does not do what
        eager does. After any other error, such as RankLost, this rank must leave the others at once.
        """

    def run(self, x: torch.Tensor, y: torch.Tensor, lr: float, last_of_accumulation: bool = True) -> None:
        """Launch one batch on the current stream; with `last_of_accumulation` also the update.

        Every batch weighs 1/accumulate, however many there are in front of an update. A batch of another size than the
        example's runs in eager.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors beside the weights: copy them before the next run. Names: optimizer.PARAMETER.SLOT,
        accumulated.PARAMETER, scaler.scale, scaler.growth_tracker.
        """

    def load_state_dict(self, state: Tensors) -> None:
        """Take over the values of such tensors, exactly. Raises UsageError if they do not fit."""

    def close(self) -> None:
        """Give memory back. The step cannot be run afterwards."""


class Objective(nn.Module):
    """A module with its loss: (x, y) -> loss in fp32, number of records classified right."""

    def __init__(self, request: StepRequest, device: torch.device) -> None:
        super().__init__()
        self.module = request.module
        self._loss = request.loss
        self.computes_in = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(request.precision, torch.float32)
        self._device_type = device.type

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self._context():
            outputs = self.module(x)
            loss = self._loss(outputs, y)
        return loss.float(), _count_correct(outputs, y)

    def _context(self) -> Any:
        if self.computes_in is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self.computes_in)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StepState:
    """What outlasts a step beside the module's own tensors."""

    optimizer: Optimizer
    accumulated: dict[str, torch.Tensor]
    accumulating: set[str]  # parameters that got gradients since the last update; others are not updated


def _state_for(request: StepRequest, device: torch.device) -> _StepState:
    """The state that a request shares with others, or a new one."""
    if request.shared is not None and request.shared.state is not None:
        shared: _StepState = request.shared.state
        return shared
    accumulated: dict[str, torch.Tensor] = {}
    if request.accumulate > 1:
        accumulated = {n: torch.zeros_like(p) for n, p in request.parameters.items()}
    state = _StepState(optimizer=Optimizer(request, device), accumulated=accumulated, accumulating=set())
    if request.shared is not None:
        request.shared.state = state
    return state


class Arithmetic:
    """The parts of a step: forward, gradients, update. Its state never moves."""

    def __init__(self, request: StepRequest, device: torch.device) -> None:
        self.objective = Objective(request, device)
        self.tensors = {n: t for n, t in state_of(request.module).items() if writable(t)}  # those before the first call
        self.parameters: dict[str, torch.Tensor] = dict(request.parameters)
        state = _state_for(request, device)
        self.optimizer = state.optimizer
        self.accumulated = state.accumulated
        self._accumulating = state.accumulating
        self.counters = Counters(request.module)
        self._masked = isinstance(request.module, Packed) and any(p.is_flags for p in request.module.layout.parts)
        self._share = 1.0 / request.accumulate
        self.reduction = None if request.ranks is None else Reduction(request.ranks, request.module, device)
        self._hides_gradients: bool | None = None

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors that outlast a step, beside the module's own."""
        return {**self.optimizer.state(), **{f"accumulated.{n}": t for n, t in self.accumulated.items()}}

    def follow_layout(self) -> None:
        """Lay the state out as the parameters lie now. No value changes."""
        self.optimizer.follow_layout()
        for name, tensor in self.accumulated.items():
            self.accumulated[name] = laid_out_as(tensor, self.parameters[name])

    def forward(
        self, objective: Callable[..., Any], x: torch.Tensor, y: torch.Tensor
    ) -> tuple[Any, list[torch.Tensor]]:
        """What an objective returns, and the counters of batches that the caller must raise by one."""
        if not self.counters.known:
            with self.counters.watched(), self._without_shortcuts():
                return objective(x, y), []
        with self.counters.apart() as counters, self._without_shortcuts():
            return objective(x, y), counters

    def _without_shortcuts(self) -> contextlib.AbstractContextManager[None]:
        """Keep libraries from choosing an attention by the values of masks, which differ from batch to batch. A replay
        cannot choose, and another attention draws other random numbers.
        """
        return as_if_compiled() if self._masked else contextlib.nullcontext()

    def start_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss, with which the backward pass starts."""
        scale = self.optimizer.scale
        if self.reduction is not None:
            weight = self.reduction.weight * self._share
            return weight if scale is None else scale * weight
        return torch.full_like(loss, self._share) if scale is None else scale * self._share

    def gradients(self, loss: torch.Tensor, start: torch.Tensor, *, accumulate: bool = True) -> dict[str, torch.Tensor]:
        """Gradients of the parameters that the loss depends on; `accumulate` as in `engine.step.differentiate`."""
        return differentiate({"loss": loss}, self.parameters, {"loss": start}, accumulate=accumulate)

    def learn(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Run a batch forward and backward, to learn which parameters get a gradient."""
        with torch.enable_grad():
            (loss, _), _ = self.forward(self.objective, x, y)
        assert self.reduction is not None
        found = self.gradients(loss, self.start_gradient(loss.detach()))
        self.reduction.arrange({n: self.parameters[n] for n in found})

    def hides_gradients(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether some gradients exist only where autograd accumulates them, as behind reentrant checkpoints.

        The first call runs the batch forward and backward, which may change statistics and random states.
        """
        if self._hides_gradients is None:
            found = []
            for accumulate in (True, False):
                with torch.enable_grad():
                    (loss, _), _ = self.forward(self.objective, x, y)
                try:
                    found.append(self.gradients(loss, self.start_gradient(loss.detach()), accumulate=accumulate).keys())
                except RuntimeError:  # what reentrant checkpoints answer
                    if accumulate:
                        raise
            self._hides_gradients = len(found) == 1 or found[0] != found[1]
        return self._hides_gradients

    @torch.no_grad()
    def figures(self, loss: torch.Tensor, correct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, without its gradient, and number of records classified right, of the batches of all ranks."""
        loss = loss.detach()
        return (loss, correct) if self.reduction is None else self.reduction.figures(loss, correct)

    @torch.no_grad()
    def finish(self, found: Tensors, *, update: bool) -> Update | None:
        """Accumulate the gradients if the step does that, and with `update` change the weights."""
        gradients = {n: laid_out_as(g, self.parameters[n]) for n, g in found.items()}
        if self.accumulated:
            sums = [self.accumulated[n] for n in gradients]
            add_(sums, list(gradients.values()))
            self._accumulating |= gradients.keys()
            if not update:
                return None
            gradients = {n: t for n, t in self.accumulated.items() if n in self._accumulating}
            self._accumulating.clear()
        summed = gradients if self.reduction is None else self.reduction.gradients(gradients)
        done = self.optimizer.apply(summed, apart=self.reduction is not None)
        if self.accumulated:
            zero_(list(gradients.values()))
        return done


def state_of_step(arithmetic: Arithmetic, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor that outlasts a step or is set before it, by the name under which programs know it."""
    return {
        **arithmetic.tensors,
        **{f"@{name}": tensor for name, tensor in arithmetic.state().items()},
        **({} if arithmetic.reduction is None else arithmetic.reduction.state()),
        "@lr": arithmetic.optimizer.lr,
        **{f"@{name}": tensor for name, tensor in inputs.items()},
    }


class EagerStep:
    """A training step in eager, because there is no schedule, or because eager is faster."""

    def __init__(self, request: StepRequest, device: torch.device, *, fallback: str | None = None) -> None:
        self.fallback: str | None = fallback
        self.schedule: Schedule | None = None
        self.schedules: Mapping[Role, Schedule] = MappingProxyType({})
        self.arithmetic = Arithmetic(request, device)
        self._accumulates = request.accumulate > 1
        self._inputs = {
            "x": torch.zeros(request.x.shape, dtype=request.x.dtype, device=device),
            "y": torch.zeros(request.y.shape, dtype=request.y.dtype, device=device),
        }
        self.loss = torch.zeros((), device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), dtype=torch.bool, device=device)
        self.grad_norm: torch.Tensor | None = torch.zeros((), device=device) if request.clip_norm else None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return self._inputs

    def instead_of(self, schedules: Mapping[Role, Schedule]) -> None:
        """Note that this runs in place of these schedules, which were measured to be slower."""
        self.schedule, self.schedules = schedules[Role.UPDATE], dict(schedules)

    def weigh(self, share: float) -> None:
        assert self.arithmetic.reduction is not None
        self.arithmetic.reduction.weight.fill_(share)

    def join(self, peers: Peers) -> None:
        """The order in which gradients are summed is learnt from a batch of the example's."""
        arithmetic = self.arithmetic
        with restoring_state(arithmetic.objective, self.loss.device):
            arithmetic.learn(*self._inputs.values())

    def run(self, x: torch.Tensor, y: torch.Tensor, lr: float, last_of_accumulation: bool = True) -> None:
        self.arithmetic.optimizer.lr.fill_(lr)
        self.run_batch(x, y, update=last_of_accumulation or not self._accumulates)

    def run_batch(self, x: torch.Tensor, y: torch.Tensor, *, update: bool) -> None:
        """Train on one batch at the current learning rate."""
        x, y = (given.to(static.device) for given, static in zip((x, y), self._inputs.values(), strict=True))
        with torch.enable_grad():
            (loss, correct), counters = self.arithmetic.forward(self.arithmetic.objective, x, y)
        if counters:
            add_(counters, 1)
        found = self.arithmetic.gradients(loss, self.arithmetic.start_gradient(loss.detach()))
        self._finish(found, loss, correct, update=update)

    def sit_out(self, lr: float, last_of_accumulation: bool = True) -> None:
        """Take part in a batch of which this rank has no records. The weight of its share must be 0."""
        arithmetic = self.arithmetic
        assert arithmetic.reduction is not None
        arithmetic.optimizer.lr.fill_(lr)
        with arithmetic.counters.apart() as counters:
            if counters:
                add_(counters, 1)
        summed = set(arithmetic.reduction.names)
        # In the order of all other ranks' gradients: the bits of a norm depend on it.
        nothing = {name: torch.zeros_like(p) for name, p in arithmetic.parameters.items() if name in summed}
        loss, correct = torch.zeros_like(self.loss), torch.zeros_like(self.correct)
        self._finish(nothing, loss, correct, update=last_of_accumulation or not self._accumulates)

    def _finish(self, found: Tensors, loss: torch.Tensor, correct: torch.Tensor, *, update: bool) -> None:
        done = self.arithmetic.finish(found, update=update)
        if done is not None:
            self.grad_norm = done.grad_norm
            self.found_inf = done.found_inf if done.found_inf is not None else self.found_inf
        # After the gradients, which a schedule sums while the backward pass still runs.
        self.loss, self.correct = self.arithmetic.figures(loss, correct)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.arithmetic.state()

    def load_state_dict(self, state: Tensors) -> None:
        load_state(self.arithmetic.state(), state)

    def close(self) -> None:
        pass


def _count_correct(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """How many records are classified correctly, by the same scores as in loss and validations.

    0 unless labels are classes [batch] and one output can be meant by the scores [batch, classes].
    """
    if y.dim() == 1 and not y.is_floating_point():
        scores = list(scores_among(flatten_outputs(outputs)).values())
        if len(scores) == 1 and scores[0].shape[0] == y.shape[0]:
            return (scores[0].detach().argmax(1) == y).sum()
    return torch.zeros((), dtype=torch.int64, device=y.device)
