"""A training step, ready to run: recorded whole, searched, checked, captured; or in eager, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import CheckFailed, EngineError, OutOfMemory
from nimble_jobs.planner.build import tolerance_for
from nimble_jobs.planner.eager_step import EagerStep, TrainingStep
from nimble_jobs.planner.half import explained
from nimble_jobs.planner.optimizer import Tensors
from nimble_jobs.planner.request import schedule_key
from nimble_jobs.planner.step_key import check_seed, key_parts_of_step
from nimble_jobs.planner.step_request import OptimizerRecipe, StepRequest
from nimble_jobs.planner.step_search import FoundStep, StepSearch
from nimble_jobs.planner.traces import Places, no_traces
from nimble_jobs.schedule import Candidate, Schedule

__all__ = ["CapturedStep", "EagerStep", "OptimizerRecipe", "StepRequest", "TrainingStep", "prepare_step"]

Report = Callable[..., None]


class CapturedStep:
    """A training step that replays schedules."""

    fallback: str | None = None

    def __init__(
        self,
        eager: EagerStep,
        instances: Mapping[bool, Instance],
        inputs: Mapping[str, torch.Tensor],
        schedules: Mapping[bool, Schedule],
        places: Places,
    ) -> None:
        self._eager = eager
        self._instances = dict(instances)  # by whether they update the weights
        self._inputs = dict(inputs)
        self.schedule: Schedule | None = schedules[True]
        self.schedules = dict(schedules)  # likewise
        self._places = places
        self._latest: Instance | None = None  # None: eager's
        self._updated: Instance | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return self._inputs

    @property
    def loss(self) -> torch.Tensor:
        return self._eager.loss if self._latest is None else self._latest.outputs["loss"]

    @property
    def correct(self) -> torch.Tensor:
        return self._eager.correct if self._latest is None else self._latest.outputs["correct"]

    @property
    def found_inf(self) -> torch.Tensor:
        outputs = self._updated.outputs if self._updated is not None else {}
        return outputs.get("found_inf", self._eager.found_inf)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        outputs = self._updated.outputs if self._updated is not None else {}
        return outputs.get("grad_norm", self._eager.grad_norm)

    def run(self, x: torch.Tensor, y: torch.Tensor, lr: float, last_of_accumulation: bool = True) -> None:
        if not self._instances:
            raise EngineError("the training step is closed")
        update = last_of_accumulation or False not in self._instances
        if x.shape != self._inputs["x"].shape or y.shape != self._inputs["y"].shape:
            self._eager.run(x, y, lr, last_of_accumulation)
            self._latest, self._updated = None, None if update else self._updated
            return
        for static, given in zip(self._inputs.values(), (x, y), strict=True):
            if given is not static:
                static.copy_(given, non_blocking=True)
        self._eager.arithmetic.optimizer.lr.fill_(lr)
        instance = self._instances[update]
        instance.replay()
        self._latest, self._updated = instance, instance if update else self._updated

    def state_dict(self) -> dict[str, torch.Tensor]:
        self._places.check()
        return self._eager.state_dict()

    def load_state_dict(self, state: Tensors) -> None:
        self._places.check()
        self._eager.load_state_dict(state)

    def close(self) -> None:
        for instance in self._instances.values():
            instance.close()
        self._instances = {}
        self._latest = self._updated = None


def prepare_step(request: StepRequest, *, device: torch.device, report: Report = lambda **_: None) -> TrainingStep:
    """The fastest checked step of `request.module`, which lies on `device`.

    Weights, statistics and random states are afterwards as they were; weights of convolutions may lie in another memory
    format inside of the same parameters. A step that no schedule can hold, or that disagrees with eager, runs in eager,
    and `fallback` says why. Raises OutOfMemory.
    """
    report(phase="build")
    start = time.perf_counter()
    eager = EagerStep(request, device)
    tolerance = request.tolerance if request.tolerance is not None else default_tolerance(request, device)
    search = StepSearch(request, eager, device, tolerance=tolerance)
    try:
        with no_traces(request.module, device), torch.inference_mode(False):
            try:
                found, instances, eager_us = _searched(search, eager, request, device)
            except BaseException:
                search.use("given")
                raise
    except OutOfMemory:
        raise
    except (EngineError, CheckFailed) as e:
        eager.fallback = str(e)
        return eager
    common = _Common(
        request=request,
        found=found,
        candidates=explained(search.candidates, found.candidate, _eager_candidate(request, eager_us)),
        tolerance=tolerance,
        device=device,
        eager_us=eager_us,
        build_s=time.perf_counter() - start,
    )
    schedules = {update: common.schedule(update, instance.bytes) for update, instance in instances.items()}
    names = {p.name for s in schedules.values() for p in s.program.state}
    return CapturedStep(eager, instances, search.inputs, schedules, Places.of(request.module, names))


def default_tolerance(request: StepRequest, device: torch.device) -> float:
    """That of the narrowest type that the step computes in. Products in TF32 have fp16's ten bits."""
    backends: Any = torch.backends
    tf32 = "tf32" in (backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision)
    kind = "fp16" if request.precision == "fp32" and device.type == "cuda" and tf32 else request.precision
    return max(verify.TOLERANCE[kind], tolerance_for(request.module, request.x))


def _searched(
    search: StepSearch, eager: EagerStep, request: StepRequest, device: torch.device
) -> tuple[FoundStep, dict[bool, Instance], float]:
    """What was found, captured and checked once more; and the time of an update in eager, in microseconds."""
    objective, (x, y) = eager.arithmetic.objective, search.inputs.values()
    try:
        eager_us = measure.time_us(lambda: eager.run_with(objective, x, y, update=True), device)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e
    finally:
        search.restore()
    found = search.run()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the other candidates left behind
    instances = search.capture(found.recordings, {u: h.plan for u, h in found.halves.items()})
    search.restore()
    try:
        seed = check_seed(found.recordings[True].program, request, search.tolerance, device)
        search.check(instances, seed=seed)
    except BaseException:
        for instance in instances.values():
            instance.close()
        raise
    return found, instances, eager_us


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What the schedules of a step's programs share."""

    request: StepRequest
    found: FoundStep
    candidates: tuple[Candidate, ...]
    tolerance: float
    device: torch.device
    eager_us: float
    build_s: float

    def schedule(self, update: bool, nbytes: int) -> Schedule:
        half, program = self.found.halves[update], self.found.recordings[update].program
        return Schedule(
            key=schedule_key(key_parts_of_step(program, self.request, self.tolerance, self.device, update=update)),
            program=program,
            plan=half.plan,
            facts=half.facts,
            durations_us=half.durations_us,
            kernels=self.found.source.kernels,
            layout=self.found.source.layout,
            candidates=self.candidates,
            tolerance=self.tolerance,
            error=self.found.error,
            device=devices.describe(self.device),
            eager_us=self.eager_us,
            replay_us=half.replay_us,
            peak_bytes=nbytes,
            build_s=self.build_s,
        )


def _eager_candidate(request: StepRequest, eager_us: float) -> Candidate:
    replay_us = request.accumulate * eager_us
    return Candidate(
        name="eager",
        replay_us=replay_us,
        records_per_s=request.accumulate * request.x.shape[0] / replay_us * 1e6,
        peak_bytes=None,
        error=0.0,
        chosen=False,
        reason="the reference",
    )
