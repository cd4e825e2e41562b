"""How each system trains: the loop that everybody writes, around an objective that is eager, compiled or captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nimble_jobs.bench.request import CONTIGUOUS, WITHOUT_GPU
from nimble_jobs.bench.runners import WARM_CALLS, Tensors, capture
from nimble_jobs.bench.training_cell import TrainingCell, TrainingRunner
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.errors import UsageError
from nimble_jobs.planner.step.eager import Objective
from nimble_jobs.planner.step.request import OptimizerRecipe

Ready = tuple[str, TrainingRunner]


def require_device(family: str, cell: TrainingCell) -> None:
    """Raises UsageError where the cell's device cannot run a family."""
    if family not in WITHOUT_GPU and cell.device.type != "cuda":
        raise UsageError("needs a CUDA device")


def prepare(family: str, cell: TrainingCell, layout: str) -> Iterator[Ready]:
    """Name and runner of a family other than ours. Raises whatever a system raises."""
    if family == "eager":
        yield family, _warm(Loop(cell, layout, lambda objective: objective), cell, layout)
    elif family == "cuda-graph":
        yield family, CapturedLoop(cell, layout)
    else:
        mode = family.removeprefix("compile-")
        forget_compiled()
        yield family, _warm(Loop(cell, layout, lambda objective: _compiled(objective, mode)), cell, layout)


def reference(cell: TrainingCell) -> TrainingRunner:
    """Eager, whose losses all other systems must reproduce."""
    return Loop(cell, CONTIGUOUS, lambda objective: objective)


class Loop:
    """Zero the gradients, forward, loss, backward, step."""

    loads_free = True

    def __init__(self, cell: TrainingCell, layout: str, wrap: Callable[[nn.Module], Callable[..., Any]]) -> None:
        self._device = cell.device
        self.module = cell.module(layout)
        self._start = weights_on_host(self.module)
        objective = Objective(cell.request(self.module, layout), cell.device)
        self._call: Callable[..., Any] | None = wrap(objective)
        self.optimizer = optimizer_of(cell.case.recipe, self.module, cell.case.lr, capturable=False)
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._loss: torch.Tensor | None = None

    def load(self, inputs: Tensors) -> None:
        self._inputs = tuple(
            t if t.device.type == self._device.type else t.to(self._device, non_blocking=True) for t in inputs.values()
        )

    def run(self) -> None:
        assert self._call is not None
        self._loss = None  # or memory that replays share would count as taken
        if self._device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.enable_grad():
            self._loss = _step(self._call, self._inputs, self.optimizer)

    def outputs(self) -> dict[str, torch.Tensor]:
        assert self._loss is not None
        return {"loss": self._loss.detach()}

    def reset(self) -> None:
        start_again(self.module, self._start, self.optimizer)

    def close(self) -> None:
        self._call = self._loss = None
        self._inputs = ()


class CapturedLoop:
    """The same step, all of it in one CUDA graph, as PyTorch's documentation shows."""

    loads_free = False

    def __init__(self, cell: TrainingCell, layout: str) -> None:
        self.module = cell.module(layout)
        self._start = weights_on_host(self.module)
        call = Objective(cell.request(self.module, layout), cell.device)
        self.optimizer = optimizer_of(cell.case.recipe, self.module, cell.case.lr, capturable=True)
        self._inputs = {n: t.clone() for n, t in cell.inputs(layout)[0].items()}
        given = tuple(self._inputs.values())
        self._graph: torch.cuda.CUDAGraph | None
        with torch.enable_grad():
            self._graph, self._loss = capture(
                lambda: _step(call, given, self.optimizer, keep=True),
                cell.device,
                warm_up=lambda: _step(call, given, self.optimizer),
            )

    def load(self, inputs: Tensors) -> None:
        for buffer, given in zip(self._inputs.values(), inputs.values(), strict=True):
            buffer.copy_(given, non_blocking=True)

    def run(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    def outputs(self) -> dict[str, torch.Tensor]:
        return {"loss": self._loss.detach()}

    def reset(self) -> None:
        start_again(self.module, self._start, self.optimizer)

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = None


def optimizer_of(recipe: OptimizerRecipe, module: nn.Module, lr: float, *, capturable: bool) -> torch.optim.Optimizer:
    """torch's own, as it chooses to run it."""
    if recipe.name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=recipe.weight_decay, capturable=capturable)


def weights_on_host(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies that no device memory is taken for."""
    return {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}


def start_again(module: nn.Module, weights: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Weights as they were, and an optimizer that has seen nothing; all in place."""
    module.load_state_dict(weights)
    for slots in optimizer.state.values():
        for tensor in slots.values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()


def _step(
    call: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer,
    *,
    keep: bool = False,
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss: torch.Tensor = call(*inputs)[0]
    loss.backward()
    optimizer.step()
    if not keep:
        optimizer.zero_grad(set_to_none=True)
    return loss


def _compiled(objective: nn.Module, mode: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(objective, mode=None if mode == "default" else mode, dynamic=False)
    return compiled


def _warm(runner: Loop, cell: TrainingCell, layout: str) -> Loop:
    inputs = cell.inputs(layout)
    for turn in range(WARM_CALLS):
        runner.load(inputs[turn])
        runner.run()
    return runner
