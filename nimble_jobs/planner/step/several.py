"""Training steps of several batch shapes over the same weights and optimizer state, as one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nimble_jobs.errors import EngineError
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.planner.step.reduction import Peers
from nimble_jobs.planner.step.request import Tensors
from nimble_jobs.schedule import Schedule


class SeveralSteps:
    """Runs each batch by the step whose records have as many values as its own.

    The steps were made from requests with one `Shared`. So the state of one is the state of all. `schedule` and
    `inputs` are those of the first one.
    """

    def __init__(self, steps: Sequence[TrainingStep]) -> None:
        """The last dimension of each step's x is different. Raises EngineError if two are equal."""
        self.steps = tuple(steps)
        self._by_width = {step.inputs["x"].shape[-1]: step for step in steps}
        if len(self._by_width) < len(self.steps):
            raise EngineError("two training steps take records of the same size")
        self._last = self._updated = first = self.steps[0]
        self.replays = 0  # updates so far that a schedule made
        self.schedule: Schedule | None = first.schedule
        self.schedules: Mapping[Role, Schedule] = first.schedules
        # Why some of the batches run in eager.
        self.fallback = next((step.fallback for step in self.steps if step.fallback is not None), None)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return self.steps[0].inputs

    @property
    def loss(self) -> torch.Tensor:
        return self._last.loss

    @property
    def correct(self) -> torch.Tensor:
        return self._last.correct

    @property
    def found_inf(self) -> torch.Tensor:
        return self._updated.found_inf

    @property
    def grad_norm(self) -> torch.Tensor | None:
        return self._updated.grad_norm

    def run(self, x: torch.Tensor, y: torch.Tensor, lr: float, last_of_accumulation: bool = True) -> None:
        """Raises EngineError for a batch that belongs to none of the steps."""
        step = self._by_width.get(x.shape[-1])
        if step is None:
            raise EngineError(f"no training step takes records of {x.shape[-1]} values")
        step.run(x, y, lr, last_of_accumulation)
        self._last = step
        if last_of_accumulation:
            self._updated = step
            self.replays += step.schedule is not None and step.schedule.runs == "schedule"

    def weigh(self, share: float) -> None:
        for step in self.steps:
            step.weigh(share)

    def sit_out(self, lr: float, last_of_accumulation: bool = True) -> None:
        self._last.sit_out(lr, last_of_accumulation)

    def join(self, peers: Peers) -> None:
        for step in self.steps:
            step.join(peers)

    def state_dict(self) -> dict[str, torch.Tensor]:
        for step in self.steps[1:]:
            step.state_dict()  # each checks that the weights which its schedules move are still the module's
        return self.steps[0].state_dict()

    def load_state_dict(self, state: Tensors) -> None:
        self.steps[0].load_state_dict(state)

    def close(self) -> None:
        for step in self.steps:
            step.close()
