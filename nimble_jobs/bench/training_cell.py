"""One training task with one dtype and batch size on the device, and the losses of eager's first steps.

Eager runs twice, with two seeds for dropout: how far apart its own losses are is the noise that is forgiven to others.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

from nimble_jobs.bench.cell import ROTATED, Batches
from nimble_jobs.bench.request import CHANNELS_LAST, CONTIGUOUS
from nimble_jobs.bench.runners import Runner
from nimble_jobs.bench.training_case import Case
from nimble_jobs.engine.device import synchronize
from nimble_jobs.errors import CheckFailed
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.step.request import Precision, StepRequest

STEPS = 50
_SEED = 1234

# Largest accepted difference of losses from eager's, on average over the steps, as a share of their size. Rounding
# errors grow from step to step, as they do between two runs of eager with other kernels.
TOLERANCE = {"fp32": 0.05, "bf16": 0.10}

# Of our own check of one step, loss and statistics; gradients have ten times as much. fp32 means TF32 on a GPU.
_STEP_TOLERANCE = {"fp32": 2e-2, "bf16": 5e-2}


class TrainingRunner(Runner, Protocol):
    """A system that is ready to train: each run is one step; its output is the loss."""

    def reset(self) -> None:
        """Back to the weights and the state before the first step."""


class TrainingCell(Batches):
    """Weights, batches and eager's losses, which every system shares."""

    def __init__(
        self,
        case: Case,
        dtype: str,
        batch: int,
        device: torch.device,
        tolerance: float | None,
        *,
        steps: int = STEPS,
    ) -> None:
        super().__init__([case.batch(batch, seed) for seed in range(ROTATED)], batch, device)
        self.case = case
        self.dtype = dtype
        self.tolerance = tolerance if tolerance is not None else TOLERANCE[dtype]
        self._steps = steps
        self._expected: torch.Tensor | None = None
        self._noise = 0.0

    def expect(self, reference: TrainingRunner) -> None:
        """Take eager's losses from a runner of its."""
        self._expected = self._losses(reference, CONTIGUOUS, _SEED)
        self._noise = _difference(self._losses(reference, CONTIGUOUS, _SEED + 1), self._expected)

    @property
    def expecting(self) -> bool:
        """Whether eager's losses are known."""
        return self._expected is not None

    def module(self, layout: str) -> nn.Module:
        """A module of its own for each caller, with the weights that training starts from."""
        made = self.case.make().to(self.device)
        if layout == CHANNELS_LAST:
            made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return made

    def request(self, module: nn.Module, layout: str, options: BuildOptions | None = None) -> StepRequest:
        """The step of a module."""
        example = self.inputs(layout)[0]
        return StepRequest(
            module=module,
            x=example["x"],
            y=example["y"],
            loss=nn.functional.cross_entropy,
            loss_name="cross_entropy",
            optimizer=self.case.recipe,
            precision=cast(Precision, self.dtype),
            options=options or BuildOptions(),
            tolerance=_STEP_TOLERANCE[self.dtype],
        )

    def check(self, runner: TrainingRunner, layout: str) -> float:
        """How far its losses are from eager's. Raises CheckFailed above the tolerance and what eager itself varies."""
        assert self._expected is not None
        difference = _difference(self._losses(runner, layout, _SEED), self._expected)
        allowed = self.tolerance + 2 * self._noise
        if not difference <= allowed:
            raise CheckFailed(
                f"the losses of {self._steps} steps differ from eager's by {difference:.3g} on average; "
                f"the tolerance is {allowed:.3g}"
            )
        return difference

    def _losses(self, runner: TrainingRunner, layout: str, seed: int) -> torch.Tensor:
        runner.reset()
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        losses = []
        batches = self.inputs(layout)
        for step in range(self._steps):
            runner.load(batches[step % len(batches)])
            runner.run()
            losses.append(runner.outputs()["loss"].detach().clone())
        synchronize(self.device)
        runner.reset()
        return torch.stack(losses).double().cpu()


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean absolute difference as a share of the mean."""
    return float((found - expected).abs().mean() / expected.abs().mean())
