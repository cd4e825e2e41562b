"""A module in evaluation mode, for validations between steps: replayed from a schedule over the live weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import EngineError
from nimble_jobs.planner.build import build_best
from nimble_jobs.planner.options import BuildOptions
from nimble_jobs.planner.traces import no_traces
from nimble_jobs.workloads.training.setup import autocast, evaluating


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

    def capture(self, x: torch.Tensor, options: BuildOptions, *, tolerance: float) -> str | None:
        """Have batches like `x` replayed; weights stay where they lie. None, or why they run in eager.

        `tolerance` is the accepted relative norm of the difference from eager.
        """
        whole = _Outputs(self._module, self._dtype)
        bounds = BuildOptions(
            streams=options.streams, fuse=options.fuse, layout="given", tolerance=tolerance, budget_s=options.budget_s
        )
        try:
            with no_traces(self._module, x.device), evaluating(self._module), torch.inference_mode(False):
                if not isinstance(self._module(x), torch.Tensor):
                    return "the model returns more than one tensor"
                built = build_best(whole, {"x": x}, "validation", bounds, x.device, keep_integers=True)
        except (EngineError, torch.OutOfMemoryError) as e:
            return str(e)
        if built.failure is not None:
            built.close()
            return built.failure
        (self._instance, *_) = built.instances
        self._x = next(iter(self._instance.inputs.values()))
        return None

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
