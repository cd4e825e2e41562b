"""A training step, ready to run: recorded whole, searched, checked, captured; or in eager, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.verify import tolerance_for
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.keys.step import check_seed, default_tolerance_of, program_parts
from nimble_jobs.planner.lookup.obtain import BuildResult
from nimble_jobs.planner.lookup.stored import Storable
from nimble_jobs.planner.module.refusals import refusing_to_prepare, watch_steps
from nimble_jobs.planner.module.restoring import Places, restoring_state
from nimble_jobs.planner.search.candidate import MeasuredCandidate
from nimble_jobs.planner.search.contest import Contest, against_eager, worth_a_contest
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.search.summary import Summary, table
from nimble_jobs.planner.step.eager import EagerStep, TrainingStep
from nimble_jobs.planner.step.joint import capture_jointly
from nimble_jobs.planner.step.live import Capturable, LiveStep
from nimble_jobs.planner.step.reduction import Peers
from nimble_jobs.planner.step.request import OptimizerRecipe, StepRequest, Tensors
from nimble_jobs.planner.step.target import StepTarget
from nimble_jobs.schedule import Schedule

__all__ = ["CapturedStep", "EagerStep", "OptimizerRecipe", "StepRequest", "TrainingStep", "prepare_step"]

Report = Callable[..., None]
Parts = Mapping[str, str]


class CapturedStep:
    """A training step that replays schedules."""

    fallback: str | None = None

    def __init__(
        self,
        live: LiveStep,
        instances: Mapping[Role, Instance],
        schedules: Mapping[Role, Schedule],
        programs: Mapping[Role, Capturable],
    ) -> None:
        """`programs` are what the instances were captured from."""
        self._eager = live.eager
        # With ranks, the instances rehearse: others take their place once all ranks are there.
        self._rehearsed = None if live.request.ranks is None else (live, dict(programs))
        self._instances = dict(instances)
        self._inputs = dict(live.inputs)
        self.schedule: Schedule | None = schedules[Role.UPDATE]
        self.schedules: Mapping[Role, Schedule] = dict(schedules)
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
        if self._rehearsed is not None:
            raise EngineError("the training step has not joined the other ranks")
        update = last_of_accumulation or Role.ACCUMULATE not in self._instances
        if x.shape != self._inputs["x"].shape or y.shape != self._inputs["y"].shape:
            self._eager.run(x, y, lr, last_of_accumulation)
            self._latest, self._updated = None, None if update else self._updated
            return
        for static, given in zip(self._inputs.values(), (x, y), strict=True):
            if given is not static:
                static.copy_(given, non_blocking=True)
        self._eager.arithmetic.optimizer.lr.fill_(lr)
        instance = self._instances[Role.UPDATE if update else Role.ACCUMULATE]
        instance.replay()
        self._latest, self._updated = instance, instance if update else self._updated

    def weigh(self, share: float) -> None:
        self._eager.weigh(share)

    def sit_out(self, lr: float, last_of_accumulation: bool = True) -> None:
        self._eager.sit_out(lr, last_of_accumulation)
        self._latest = None
        self._updated = None if last_of_accumulation else self._updated

    def join(self, peers: Peers) -> None:
        assert self._rehearsed is not None
        live, programs = self._rehearsed
        self.close()
        with restoring_state(live.eager.arithmetic.objective, live.device), torch.inference_mode(False):
            self._instances = capture_jointly(live, programs, peers)
        self._rehearsed = None

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


def prepare_step(request: StepRequest, *, device: torch.device) -> TrainingStep:
    """The step that `build_step` makes, for use without a store."""
    return build_step(request, device=device, parts={}, report=lambda **_: None).value


def build_step(
    request: StepRequest, *, device: torch.device, parts: Parts, report: Report
) -> BuildResult[TrainingStep]:
    """The fastest checked step of `request.module`, which lies on `device`.

    `parts` are the parts of its key, or empty if it is not to be stored. Weights, statistics and random states keep
    their values, but weights of convolutions may end up in another memory format, inside the same parameters. A step
    that no schedule can hold, or that disagrees with eager, runs in eager, and `fallback` says why. Raises OutOfMemory.
    """
    report(phase="build")
    eager = EagerStep(request, device)
    live = LiveStep(request, eager, device, tolerance=step_tolerance(request, device))
    try:
        return _Build(live, parts, report).run()
    except (OutOfMemory, DeviceFault):
        raise
    except (EngineError, CheckFailed) as e:
        eager.fallback = str(e)
        return BuildResult(value=eager, storables=(), close=eager.close)


class _Build:
    """From the live tensors of a step to its schedules, captured."""

    def __init__(self, live: LiveStep, parts: Parts, report: Report) -> None:
        self._live = live
        self._parts = parts
        self._seed = check_seed(parts)
        self._target = StepTarget(live, seed=self._seed)
        self._search = Search(self._target, live.request.options, say=lambda _: report(phase="build"))
        self._start = time.perf_counter()

    def run(self) -> BuildResult[TrainingStep]:
        """Search, choose between the winner and eager, and capture the choice. Raises EngineError."""
        live, device = self._live, self._live.device
        with restoring_state(live.eager.arithmetic.objective, device), torch.inference_mode(False):
            try:
                live.refuse_what_replays_leave_out()
                eager_us = _eager_us(live)
                with refusing_to_prepare(device, live.in_eager):
                    winner = self._search.timed(self._search.run(only_first=live.request.only is not None))
                    devices.release_free_memory(device)  # what the other candidates left behind
                    captured = self._target.capture(winner.source, winner.programs)
                    try:
                        live.check(captured.instances, seed=self._seed)
                        contest = self._against_eager(winner, captured.instances[Role.UPDATE], eager_us)
                    except BaseException:
                        captured.close()
                        raise
                memories = {role: instance.bytes for role, instance in captured.instances.items()}
                stays_eager = contest is not None and contest.eager_wins
                if stays_eager:
                    captured.close()
                    live.use("given")
            except BaseException:
                live.use("given")
                raise
        storables = self._storables(winner, contest, eager_us, memories)
        schedules = {role: storable.schedule for role, storable in storables.items()}
        step: TrainingStep
        if stays_eager:
            live.eager.instead_of(schedules)
            step = live.eager
        else:
            programs = {role: (each.recording, each.plan, each.memory) for role, each in winner.programs.items()}
            step = CapturedStep(live, captured.instances, schedules, programs)
        return BuildResult(value=step, storables=tuple(storables.values()), close=step.close)

    def _against_eager(self, winner: MeasuredCandidate, instance: Instance, eager_us: float) -> Contest | None:
        """An update in eager and replayed, timed in turns; None if the replay is faster beyond doubt, or eager may not
        win: a training goes on with the source that it began with.
        """
        live = self._live
        replay_us = winner.programs[Role.UPDATE].replay_us
        if live.request.only is not None or not worth_a_contest(replay_us, eager_us, live.request.options):
            return None
        try:
            return against_eager(
                live.in_eager, instance.replay, live.device, eager_us=eager_us, as_given=winner.source.layout == "given"
            )
        finally:
            live.restore()

    def _storables(
        self, winner: MeasuredCandidate, contest: Contest | None, eager_us: float, memories: Mapping[Role, int]
    ) -> dict[Role, Storable]:
        request = self._live.request
        eager_us = eager_us if contest is None else contest.eager_us
        summary = Summary(
            winner=winner,
            contest=contest,
            contested=Role.UPDATE,
            candidates=table(
                self._search.candidates,
                winner,
                eager_us=request.accumulate * eager_us,
                records=self._target.records,
                contest=contest,
            ),
            tolerance=self._live.tolerance,
            error=winner.error,
            device=self._live.device,
            build_s=(time.perf_counter() - self._start) / len(memories),
            stages=self._search.clock.stages,
            memories=memories,
        )
        parts = {role: program_parts(self._parts, role) for role in request.programs}
        return {r: summary.storable(r, each, schedule_key(each), eager_us=eager_us) for r, each in parts.items()}


def step_tolerance(request: StepRequest, device: torch.device) -> float:
    """What the request asks for, else the default."""
    return request.tolerance if request.tolerance is not None else default_tolerance(request, device)


def default_tolerance(request: StepRequest, device: torch.device) -> float:
    """The default tolerance of the narrowest type that the step computes in."""
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
