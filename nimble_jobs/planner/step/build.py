"""A training step, ready to run: recorded whole, searched, checked, captured; or in eager, and why."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure
from nimble_jobs.engine.bind import arena_plan
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.planner.forward.build import tolerance_for
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.step import check_seed, default_tolerance_of, program_parts
from nimble_jobs.planner.lookup.stored import Storable
from nimble_jobs.planner.module.refusals import refusing_to_prepare
from nimble_jobs.planner.module.restoring import Places, no_traces
from nimble_jobs.planner.module.watch import watch_steps
from nimble_jobs.planner.search.contest import CLEARLY, Contest, contest, eager_counts
from nimble_jobs.planner.search.half import explained
from nimble_jobs.planner.step.eager import EagerStep, TrainingStep
from nimble_jobs.planner.step.live import LiveStep
from nimble_jobs.planner.step.optimizer import Tensors
from nimble_jobs.planner.step.request import OptimizerRecipe, StepRequest
from nimble_jobs.planner.step.search import FoundStep, StepSearch
from nimble_jobs.schedule import Candidate, Schedule

__all__ = ["BuiltStep", "CapturedStep", "EagerStep", "OptimizerRecipe", "StepRequest", "TrainingStep", "prepare_step"]

Report = Callable[..., None]
Parts = Mapping[str, str]

_NO_PARTS: Parts = MappingProxyType({})


class CapturedStep:
    """A training step that replays schedules."""

    fallback: str | None = None

    def __init__(self, live: LiveStep, instances: Mapping[bool, Instance], schedules: Mapping[bool, Schedule]) -> None:
        self._eager = live.eager
        self._instances = dict(instances)  # by whether they update the weights
        self._inputs = dict(live.inputs)
        self.schedule: Schedule | None = schedules[True]
        self.schedules: Mapping[bool, Schedule] = dict(schedules)  # likewise
        names = {p.name for s in schedules.values() for p in s.program.state}
        self._places = Places.of(live.request.module, names)
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


@dataclass(frozen=True, kw_only=True)
class BuiltStep:
    """A step that was built now, and what of it can be stored: nothing where it runs in eager."""

    step: TrainingStep
    storables: tuple[Storable, ...] = ()


def prepare_step(
    request: StepRequest, *, device: torch.device, parts: Parts = _NO_PARTS, report: Report = lambda **_: None
) -> TrainingStep:
    """The step of `build_step`."""
    return build_step(request, device=device, parts=parts, report=report).step


def build_step(
    request: StepRequest, *, device: torch.device, parts: Parts = _NO_PARTS, report: Report = lambda **_: None
) -> BuiltStep:
    """The fastest checked step of `request.module`, which lies on `device`.

    `parts` are those of its key, as far as it is to be found again. Weights, statistics and random states are
    afterwards as they were; weights of convolutions may lie in another memory format inside of the same parameters. A
    step that no schedule can hold, or that disagrees with eager, runs in eager, and `fallback` says why. Raises
    OutOfMemory.
    """
    report(phase="build")
    start = time.perf_counter()
    eager = EagerStep(request, device)
    tolerance = step_tolerance(request, device)
    live = LiveStep(request, eager, device, tolerance=tolerance)
    seed = check_seed(parts)
    search = StepSearch(live, seed=seed, report=report)
    try:
        with no_traces(eager.arithmetic.objective, device), torch.inference_mode(False):
            try:
                live.refuse_what_replays_leave_out()
                eager_us = _eager_us(live)
                with refusing_to_prepare(device, live.in_eager):
                    found = search.run()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()  # what the other candidates left behind
                    memories = {u: arena_plan(r.program, found.halves[u].plan) for u, r in found.recordings.items()}
                    plans = {u: half.plan for u, half in found.halves.items()}
                    instances = live.capture(found.recordings, plans, memories)
                    try:
                        live.check(instances, seed=seed)
                        in_turns = _against_eager(live, found, instances[True], eager_us)
                    except BaseException:
                        for instance in instances.values():
                            instance.close()
                        raise
                nbytes = {update: instance.bytes for update, instance in instances.items()}
                if in_turns is not None and in_turns.eager_wins:
                    for instance in instances.values():
                        instance.close()
                    live.use("given")
            except BaseException:
                live.use("given")
                raise
    except (OutOfMemory, DeviceFault):
        raise
    except (EngineError, CheckFailed) as e:
        eager.fallback = str(e)
        return BuiltStep(step=eager)
    eager_us = eager_us if in_turns is None else in_turns.eager_us
    common = _Common(
        found=found,
        in_turns=in_turns,
        candidates=explained(search.candidates, found.candidate, _eager_candidate(request, eager_us), in_turns),
        tolerance=tolerance,
        device=device,
        eager_us=eager_us,
        build_s=(time.perf_counter() - start) / len(instances),
    )
    storables = {
        update: common.storable(program_parts(parts, update=update), update, memories[update], nbytes[update])
        for update in instances
    }
    schedules = {update: storable.schedule for update, storable in storables.items()}
    if in_turns is not None and in_turns.eager_wins:
        eager.instead_of(schedules)
        return BuiltStep(step=eager, storables=tuple(storables.values()))
    step = CapturedStep(live, instances, schedules)
    return BuiltStep(step=step, storables=tuple(storables.values()))


def step_tolerance(request: StepRequest, device: torch.device) -> float:
    """What the request asks for, else the default."""
    return request.tolerance if request.tolerance is not None else default_tolerance(request, device)


def default_tolerance(request: StepRequest, device: torch.device) -> float:
    """That of the narrowest type that the step computes in."""
    return max(default_tolerance_of(request.precision, device), tolerance_for(request.module, request.x))


def _eager_us(live: LiveStep) -> float:
    """Time of an update in eager, in microseconds. Raises CannotRecord as `watch_steps`, OutOfMemory."""
    try:
        watch_steps(live.eager.arithmetic.objective, live.in_eager, live.device)
        live.refuse_marked_inputs()
        return measure.time_us(live.in_eager, live.device)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {live.device} for a training step: {e}") from e
    finally:
        live.restore()


def _against_eager(live: LiveStep, found: FoundStep, instance: Instance, eager_us: float) -> Contest | None:
    """An update in eager and replayed, timed in turns; None where the replay is faster beyond doubt, or eager may not
    win: where a training goes on with the source that it began with.

    Where the replay wants the weights laid out otherwise, eager's time is that of before the search.
    """
    may_win = live.request.only is None and eager_counts(live.request.options)
    if not may_win or found.halves[True].replay_us < CLEARLY * eager_us:
        return None
    eager, (x, y) = live.eager, live.inputs.values()
    try:
        if found.source.layout != "given":
            (times,) = measure.in_turns_us([instance.replay], live.device)
            return Contest.of([eager_us], times)
        objective = eager.arithmetic.objective
        return contest(lambda: eager.run_with(objective, x, y, update=True), instance.replay, live.device)
    finally:
        live.restore()


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What the schedules of a step's programs share."""

    found: FoundStep
    in_turns: Contest | None
    candidates: tuple[Candidate, ...]
    tolerance: float
    device: torch.device
    eager_us: float
    build_s: float  # each program's share

    def storable(self, parts: Parts, update: bool, memory: MemoryPlan, nbytes: int) -> Storable:
        half, recording = self.found.halves[update], self.found.recordings[update]
        compiled, binaries = pack(recording.kernels) or ((), b"")
        in_turns = self.in_turns
        schedule = Schedule(
            key=schedule_key(parts),
            program=recording.program,
            plan=half.plan,
            facts=half.facts,
            offsets=memory.offsets,
            arena_bytes=memory.peak_bytes,
            durations_us=half.durations_us,
            kernels=self.found.source.kernels,
            layout=self.found.source.layout,
            compiled=compiled,
            binaries=hashlib.sha256(binaries).hexdigest() if binaries else None,
            candidates=self.candidates,
            tolerance=self.tolerance,
            error=self.found.error,
            device=devices.describe(self.device),
            eager_us=self.eager_us,
            replay_us=in_turns.replay_us if in_turns is not None and update else half.replay_us,
            peak_bytes=nbytes,
            build_s=self.build_s,
            runs="eager" if in_turns is not None and in_turns.eager_wins else "schedule",
            noise=None if in_turns is None else in_turns.noise,
        )
        return Storable(schedule=schedule, parts=parts, constants=recording.constants, binaries=binaries)


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
