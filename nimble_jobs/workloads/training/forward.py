"""A module in evaluation mode, for validations between steps: replayed from a schedule over the live weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import DeviceFault, EngineError
from nimble_jobs.job import Hit
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.step import forward_parts
from nimble_jobs.planner.lookup.obtain import Waiting
from nimble_jobs.planner.module.restoring import no_traces
from nimble_jobs.planner.step.build import TrainingStep, step_tolerance
from nimble_jobs.planner.step.validation import PreparedForward, prepare_forward
from nimble_jobs.store import Store
from nimble_jobs.workloads.training.setup import Setup, autocast, evaluating

REPLAYED_ON = ("cuda",)  # types of devices; launches cost nothing on a CPU


class Forward:
    """Calls the module. Until `capture`, and for batches of another shape, in eager."""

    def __init__(self, module: nn.Module, dtype: str) -> None:
        self._module = module
        self._dtype = dtype
        self._instance: Instance | None = None
        self._x: torch.Tensor | None = None

    @property
    def replays(self) -> bool:
        return self._instance is not None

    def capture(self, x: torch.Tensor, prepare: Callable[[nn.Module], PreparedForward]) -> PreparedForward | str:
        """Have batches like `x` replayed by what `prepare` gives for the outputs by name; weights stay where they lie.

        Or why nothing can be prepared. Raises DeviceFault, and what `prepare` raises that is no error of the engine.
        """
        whole = _Outputs(self._module, self._dtype)
        try:
            with no_traces(self._module, x.device), evaluating(self._module), torch.inference_mode(False):
                if not isinstance(self._module(x), torch.Tensor):
                    return "the model returns more than one tensor"
                prepared = prepare(whole)
        except DeviceFault:
            raise
        except (EngineError, torch.OutOfMemoryError) as e:
            return str(e)
        self._instance = prepared.instance
        if self._instance is not None:
            self._x = next(iter(self._instance.inputs.values()))
        return prepared

    def __call__(self, x: torch.Tensor) -> Any:
        """What the module returns, valid until the next call; the module is in evaluation mode."""
        if self._instance is None or self._x is None or x.shape != self._x.shape:
            with autocast(self._dtype, x.device):
                return self._module(x)
        self._x.copy_(x, non_blocking=True)
        self._instance.replay()
        return next(iter(self._instance.outputs.values()))

    def close(self) -> None:
        """Give memory back."""
        if self._instance is not None:
            self._instance.close()
        self._instance = self._x = None


def have_replayed(
    forward: Forward,
    ready: Setup,
    step: TrainingStep,
    *,
    on_miss: str,
    store: Store,
    check_code: Callable[[], None],
    told: Callable[[str], None],
    waiting: Waiting,
) -> PreparedForward:
    """Capture the forward pass of a step's module, from the store or built now; `failure` says why it stays eager.

    Raises DeviceFault, and what `planner.step.validation.prepare_forward` raises that is no error of the engine.
    """
    request = ready.request
    replays = step.schedule is not None and step.schedule.runs == "schedule"
    layout = step.schedule.layout if step.schedule is not None and replays else "given"
    tolerance = step_tolerance(request, request.x.device)
    parts = forward_parts(ready.parts, request.x, layout)
    found = forward.capture(
        request.x,
        lambda module: prepare_forward(
            module,
            request.x,
            parts,
            options=replace(request.options, layout="given", tolerance=tolerance),
            store=store,
            on_miss=on_miss,
            check_code=check_code,
            told=told,
            waiting=waiting,
        ),
    )
    if isinstance(found, PreparedForward):
        return found
    return PreparedForward(key=schedule_key(parts), input=parts["input"], hit=Hit.MISS, failure=found)


class _Outputs(nn.Module):
    """The module's outputs by name, as the recorder wants them."""

    def __init__(self, module: nn.Module, dtype: str) -> None:
        super().__init__()
        self.module = module
        self._dtype = dtype
        self.train(module.training)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with autocast(self._dtype, x.device):
            return flatten_outputs(self.module(x))
