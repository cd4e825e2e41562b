"""One rank's attempt at a training: prepare module, step and validations, and train. Most jobs have one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from nimble_jobs.engine.collectives import rehearsing
from nimble_jobs.errors import JobFailed, NoJointReplay
from nimble_jobs.models.packed import Packed
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.step import kernels_digest
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step.build import EagerStep, TrainingStep
from nimble_jobs.planner.step.prepare import PreparedStep
from nimble_jobs.planner.step.several import SeveralSteps
from nimble_jobs.plural import count
from nimble_jobs.schedule import Schedule
from nimble_jobs.spec import JobSpec
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.context import JobContext, Stop
from nimble_jobs.workloads.telling import tell_unchecked
from nimble_jobs.workloads.training.batches.bucketed import TextBatches, TextEpochs
from nimble_jobs.workloads.training.batches.epochs import Batches
from nimble_jobs.workloads.training.gauge.figures import Gauge
from nimble_jobs.workloads.training.gauge.journal import Journal
from nimble_jobs.workloads.training.keep import resume
from nimble_jobs.workloads.training.keep.keeper import Keeper
from nimble_jobs.workloads.training.keep.shared import SharedKeeper
from nimble_jobs.workloads.training.keep.state import Progress
from nimble_jobs.workloads.training.loop import Loop, Plan, Stages
from nimble_jobs.workloads.training.ranks.gang import Gang
from nimble_jobs.workloads.training.session import Reading
from nimble_jobs.workloads.training.step import prepare, setup, telling, texts
from nimble_jobs.workloads.training.step.building import Building
from nimble_jobs.workloads.training.step.losses import make_loss
from nimble_jobs.workloads.training.step.paying import Paying
from nimble_jobs.workloads.training.step.prepare import Means
from nimble_jobs.workloads.training.step.remembering import remembered
from nimble_jobs.workloads.training.step.setup import Setup
from nimble_jobs.workloads.training.step.texts import TrainTexts
from nimble_jobs.workloads.training.step.validation import Forward, SeveralForwards, Validation, replayable
from nimble_jobs.workloads.waiting import go_on, unless_stopped, waiting

Kinds = Sequence[Source | Literal["eager"] | None]  # of steps, by the shape of their batches; None: the best


class Team(Protocol):
    """How this rank comes together with the others."""

    def meet(self, order: Mapping[str, Any], device: torch.device, check: Callable[[], None]) -> Gang:
        """Connect, once all ranks have prepared their steps. The leader's `order` says how its steps run."""

    def telling(self) -> AbstractContextManager[None]:
        """Inside, a rank that fails says why at once. What is undone then may wait for ranks that wait for this one."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A module with its step and its validations, ready to run."""

    setup: Setup
    step: TrainingStep
    forward: Forward | SeveralForwards  # of validations
    summary: dict[str, Any]  # of the schedule, for `show`
    environment: dict[str, str]  # what equal bits depend on
    varying: tuple[str, ...]  # operators that stand against equal bits
    remembered: tuple[str, ...]  # what model and loss keep in Python, which no checkpoint holds
    load_s: float
    build_s: float
    gang: Gang | None  # all ranks, if there are several


@contextmanager
def prepared(
    reading: Reading, kinds_of: Callable[[BuildOptions], Kinds], *, on_miss: str, team: Team | None = None
) -> Iterator[Ready]:
    """Load the model and prepare its schedules: for an interrupted training, those that it began with.

    With a `team`, all ranks do this, and are connected inside. Raises Stopped, ModelError, DataError, JobFailed,
    OutOfMemory, DeviceFault, RankLost.
    """
    context, spec, device = reading.context, reading.spec, reading.device
    ready = _set_up(reading)
    tell_unchecked(context, ready.limits)
    _check_metrics(spec, ready.classes)
    varying = _tried(ready, context)
    kept_in_python = remembered(ready.request)
    building = Building(context.event)
    means = _means(context, on_miss, building, _paying(reading, ready, on_miss))
    with ExitStack() as stack:
        connected = stack.enter_context(ExitStack())  # to the other ranks, until all graphs are gone
        with rehearsing() if team is not None else nullcontext():
            steps = prepare.prepare_steps(ready, means, began_with=kinds_of(ready.request.options))
            held = stack.enter_context(closing(_Held(steps)))
            forward = stack.enter_context(closing(_forward(ready, reading.texts)))
            validations: list[Schedule] = []
            if reading.data.held_out is not None and replayable(device):
                validations = _replay_validations(ready, steps, forward, means, context)
        gang = None
        if team is not None:
            order = {"eager": runs_in_eager(steps)}
            gang = connected.enter_context(team.meet(order, device, lambda: go_on(context)))
            stack.enter_context(gang.summing())
            stack.enter_context(team.telling())
            steps = held.steps = joined(ready, steps, gang)
        summary = prepare.summary_of_all(ready, steps, device)
        if gang is not None:
            summary["ranks"] = gang.count
        if reading.data.held_out is not None:
            summary["validation"] = "schedule" if forward.replays else "eager"
        build_s = building.seconds
        load_s = time.perf_counter() - reading.began - build_s
        telling.tell_steps(ready.each, steps, context.event, load_s=load_s, build_s=build_s)
        yield Ready(
            setup=ready,
            step=prepare.as_one(steps),
            forward=forward,
            summary=summary,
            environment=resume.environment([one.step for one in steps], validations, device),
            varying=varying,
            remembered=kept_in_python,
            load_s=load_s,
            build_s=build_s,
            gang=gang,
        )


def _tried(ready: Setup, context: JobContext) -> tuple[str, ...]:
    """Operators that vary. Events name them, and weights that a step does not train."""
    tried = setup.try_step(ready.request)
    if varying := tried.varying:
        text = f"{', '.join(varying)} can give different bits in each run on this device; a resumed training may differ"
        context.event("not-repeatable", text, {"operators": list(varying)})
    if untrained := tried.untrained:
        weights = f"{count(len(untrained), 'weight')}, such as {untrained[0]}"
        what = f"in {setup.TRIALS} trial steps the loss did not depend on {weights}"
        text = f"{what}; what gets no gradient is published as it began"
        context.event("untrained", text, {"weights": list(untrained)})
    return varying


def joined(ready: Setup, steps: list[PreparedStep], gang: Gang) -> list[PreparedStep]:
    """The steps, which train with those of the other ranks from now on; in eager if not all ranks can replay the same.

    Raises OutOfMemory, RankLost, and EngineError if this rank fails alone.
    """
    found = gang.gather([_digest(one.step) for one in steps])
    if all(other == found[0] for other in found):
        try:
            for one in steps:
                one.step.join(gang)
            return steps
        except NoJointReplay as e:
            why = f"together with other ranks: {e}"
    else:
        why = "not all ranks could load the same schedule"
    eager = []
    for each, one in zip(ready.each, steps, strict=True):
        one.step.close()
        step = EagerStep(each.request, each.device, fallback=why)
        step.join(gang)
        eager.append(replace(one, step=step))
    return eager


def runs_in_eager(steps: Sequence[PreparedStep]) -> bool:
    """Whether no step replays a schedule."""
    return all(isinstance(one.step, EagerStep) for one in steps)


def train(
    reading: Reading,
    plan: Plan,
    ready: Ready,
    progress: Progress,
    journal: Journal,
    keeper: Keeper | SharedKeeper,
) -> tuple[Stop, dict[str, Any]]:
    """Run the loop; how it ended, and the attempt's timings. Raises what `Loop.run` raises."""
    context, held_out, validation, gang = reading.context, reading.data.held_out, None, ready.gang
    if held_out is not None:
        loss = make_loss(plan.train, context.allowed_python, smoothing=False)
        validation = Validation(
            ready.setup, ready.forward, loss, records=held_out.total, event=context.event, gang=gang
        )
    context.report(phase="run", schedule=ready.summary)
    earlier, start = len(journal.steps), time.perf_counter()
    at = {"epoch": progress.epoch, "batch": progress.batch}
    with closing(_batches(plan, reading.device, ready.setup, **at)) as batches:
        stages = Stages(
            batches=batches,
            step=ready.step,
            validation=validation,
            gauge=Gauge(ready.step, reading.device, scaled=reading.spec.model.dtype == "fp16"),
            journal=journal,
            keeper=keeper,
            gang=gang,
        )
        stop = Loop(plan, stages, progress, _stop(context, gang), _bad_records(reading, progress)).run()
    run_s, steps = time.perf_counter() - start, len(journal.steps) - earlier
    return stop, {
        "load_s": ready.load_s,
        "build_s": ready.build_s,
        "run_s": run_s,
        "replays": _replays(ready, steps),
        "steps_per_s": steps / run_s,
        "records_per_s": int(journal.steps.column("records")[earlier:].sum()) / run_s,
        **batches.meters.summary(),
    }


def _replays(ready: Ready, steps: int) -> int:
    """How many of these steps replayed a schedule."""
    if isinstance(ready.step, SeveralSteps):
        return ready.step.replays
    return steps if ready.summary["runs"] == "schedule" else 0


class _Held:
    """The steps, to be closed in the end; others may take their places."""

    def __init__(self, steps: Sequence[PreparedStep]) -> None:
        self.steps = list(steps)

    def close(self) -> None:
        for one in self.steps:
            one.step.close()


def _digest(step: TrainingStep) -> str:
    return "eager" if isinstance(step, EagerStep) else kernels_digest(step.schedules.values())


def _stop(context: JobContext, gang: Gang | None) -> Callable[[], Stop]:
    """What the job is to do; on all ranks, what the leader's is to do."""
    if gang is None:
        return context.stop
    wishes = list(Stop)
    return lambda: wishes[gang.agree(lambda: wishes.index(context.stop()))]


def _set_up(reading: Reading) -> Setup:
    """The module and what a step of it is. Raises ModelError, DataError, OutOfMemory, ModelChanged."""
    context, spec, device = reading.context, reading.spec, reading.device
    if reading.texts is None:
        return setup.prepare(spec, reading.data.reader, device, context.allowed_python)
    ready = texts.prepare(spec, reading.texts, device, context.allowed_python)
    if ready.head is not None:
        context.event("head", ready.head, {})
    return ready


def _forward(ready: Setup, read: TrainTexts | None) -> Forward | SeveralForwards:
    """What validations call, in eager until it is captured."""
    if read is None:
        return Forward.of(ready)
    dtype = ready.spec.model.dtype
    layouts = [bucket.layout for bucket in read.epochs.buckets]
    modules = {layout.nbytes: Packed(ready.module, layout, torch.float32, ready.device) for layout in layouts}
    return SeveralForwards({width: Forward(module, dtype) for width, module in modules.items()})


def _replay_validations(
    ready: Setup,
    steps: Sequence[PreparedStep],
    forward: Forward | SeveralForwards,
    means: Means,
    context: JobContext,
) -> list[Schedule]:
    """Capture what validations replay; the schedules of all that are replayed. Raises as `replay_validations`."""
    made = []
    for each, one in zip(ready.each, steps, strict=True):
        mine = forward.by_width[each.request.x.shape[-1]] if isinstance(forward, SeveralForwards) else forward
        made.append(prepare.replay_validations(mine, each, one.step, means))
    telling.tell_validations(ready.each, made, context.event)
    return [found.schedule for found in made if found.instance is not None and found.schedule is not None]


def _paying(reading: Reading, ready: Setup, on_miss: str) -> Paying | None:
    """What decides which steps are worth a build; None if the spec has decided, and for ranks that follow another."""
    if on_miss != "build" or reading.spec.schedule.progressive is False:
        return None
    return Paying(ready, reading.context.store)


def _means(context: JobContext, on_miss: str, building: Building, paying: Paying | None) -> Means:
    report = unless_stopped(context)
    return Means(
        store=context.store,
        on_miss=on_miss,
        report=report,
        trying=lambda _: report(phase="build"),
        waiting=waiting(context),
        around=building,
        paying=paying,
    )


def _bad_records(reading: Reading, progress: Progress) -> BadRecords:
    """The count of bad records, which begins with those that earlier attempts found, each counted once."""
    reader, report, before = reading.data.reader, reading.context.report, progress.bad_in_order()
    return BadRecords(reading.spec.run, reader.total, place=reader.place, report=report, before=before)


def _batches(plan: Plan, device: torch.device, ready: Setup, *, epoch: int, batch: int) -> Batches | TextBatches:
    if isinstance(plan.epochs, TextEpochs):
        return TextBatches(plan.epochs, device, epoch=epoch, batch=batch)
    return Batches(plan.epochs, device, ready.checks, epoch=epoch, batch=batch)


def _check_metrics(spec: JobSpec, classes: int | None) -> None:
    """Raises JobFailed if the spec asks for accuracy, and labels are not classes of the model."""
    assert spec.train is not None
    checkpoint, stopping = spec.train.checkpoint, spec.train.early_stopping
    best = ("train.checkpoint.best", checkpoint and checkpoint.best)
    for field, metric in (best, ("train.early_stopping.metric", stopping and stopping.metric)):
        if classes is None and metric and str(metric).endswith("accuracy"):
            raise JobFailed(f"{field}: {metric} needs labels that are classes of the model; expected a loss")
