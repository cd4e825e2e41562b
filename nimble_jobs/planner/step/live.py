"""A training step's live tensors: laid out as a schedule wants them, captured over, checked, and given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.device import release_free_memory
from nimble_jobs.engine.record import Recording
from nimble_jobs.errors import CannotRecord
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.module.refusals import refuse_backward_hooks, refuse_gradient_hooks
from nimble_jobs.planner.sources.source import Layout, Source, Variants
from nimble_jobs.planner.step.check import check_step
from nimble_jobs.planner.step.compare import copies, put
from nimble_jobs.planner.step.eager import EagerStep, state_of_step
from nimble_jobs.planner.step.record import objective_with, record_step
from nimble_jobs.planner.step.request import StepRequest
from nimble_jobs.schedule import Plan, Program

Capturable = tuple[Recording, Plan, MemoryPlan]  # what it takes to capture one program


class LiveStep:
    """Weights, optimizer state and static inputs of one step, with the values that they have at first."""

    def __init__(self, request: StepRequest, eager: EagerStep, device: torch.device, *, tolerance: float) -> None:
        self.request = request
        self.eager = eager
        self.device = device
        self.tolerance = tolerance
        self._variants = Variants(request.module)
        self._example = {"x": request.x.detach().to(device).clone(), "y": request.y.to(device).clone()}
        self.inputs = dict(self._example)  # static, laid out as the schedule wants them
        self._values = copies(self.state())

    @property
    def layouts_differ(self) -> bool:
        """Whether the module has weights that can be laid out in another way."""
        return self._variants.have_layouts

    def state(self) -> dict[str, torch.Tensor]:
        """Every live tensor, by the name under which programs know it."""
        return state_of_step(self.eager.arithmetic, self.inputs)

    def use(self, layout: Layout) -> None:
        """Lay weights, state and inputs out, with the values that they had at first."""
        release_free_memory(self.device)  # what is laid out in a large free block would keep all of it
        self._variants.use(Source(kernels="eager", layout=layout))
        self.eager.arithmetic.follow_layout()
        x = self._example["x"]
        images = layout == "channels-last" and x.dim() == 4 and x.is_floating_point()
        self.inputs = {
            "x": x.clone(memory_format=torch.channels_last) if images else x.clone(),
            "y": self._example["y"].clone(),
        }
        self.restore()

    def restore(self) -> None:
        """Give weights, state and inputs the values that they had at first."""
        put(self.state(), self._values)

    def refuse_what_replays_leave_out(self) -> None:
        """Raises CannotRecord for hooks on gradients, and for parameters that the optimizer's kernels cannot move."""
        refuse_backward_hooks(self.request.module)
        refuse_gradient_hooks(self.request.parameters.items())
        for name, parameter in self.request.parameters.items():
            if parameter.is_complex():
                raise CannotRecord(f"the parameter {name!r} is complex; no fused kernel of the optimizer updates it")

    def in_eager(self) -> None:
        """Train on the example with an update, which changes the values."""
        self.eager.run_batch(*self.inputs.values(), update=True)

    def refuse_marked_inputs(self) -> None:
        """Raises CannotRecord if a step had its batch require grad, as some do for reentrant checkpoints."""
        for name, tensor in self.inputs.items():
            if tensor.requires_grad:
                raise CannotRecord(f"the model makes its input {name!r} require grad, which a replay would not")

    def objective(self, source: Source) -> Callable[..., Any]:
        """The module with its loss, in the source's kernels."""
        return objective_with(self.eager.arithmetic, source.kernels)

    def record(
        self, source: Source, objective: Callable[..., Any], role: Role, *, like: Program | None = None
    ) -> Recording:
        """Record one program, and put all values back. `like` is an earlier recording of it. Raises CannotRecord."""
        arithmetic = self.eager.arithmetic
        accumulate = arithmetic.hides_gradients(*self.inputs.values())
        self.restore()
        recording = record_step(
            arithmetic,
            self.inputs,
            self.device,
            objective=objective,
            compiled=source.compiled,
            update=role is Role.UPDATE,
            accumulate=accumulate,
            without=source.without,
            like=like,
        )
        self.restore()
        return recording

    def capture_one(self, recording: Recording, plan: Plan, memory: MemoryPlan | None = None) -> Instance:
        """One program over the live state, which its trial run changes. Raises EngineError, OutOfMemory."""
        return capture(
            recording.program,
            plan,
            state=self.state(),
            constants=recording.constants,
            kernels=recording.kernels,
            device=self.device,
            memory=memory,
        )

    def capture(self, programs: Mapping[Role, Capturable]) -> dict[Role, Instance]:
        """These programs. The values are then as they were at first. Raises EngineError, OutOfMemory."""
        made: dict[Role, Instance] = {}
        try:
            for role in (each for each in self.request.programs if each in programs):
                made[role] = self.capture_one(*programs[role])
        except BaseException:
            for instance in made.values():
                instance.close()
            raise
        self.restore()
        return made

    def check(self, instances: Mapping[Role, Instance], *, seed: int) -> float:
        """The largest relative norm of a difference from eager. Raises CheckFailed. Restores the values."""
        try:
            return check_step(self.eager, instances, self.inputs, self.device, tolerance=self.tolerance, seed=seed)
        finally:
            self.restore()
