"""Fine-tune a model on labelled records: from a spec to published weights, through any number of attempts.

The phases of an attempt: open the data and claim the output (`session`); find the checkpoint to go on from; prepare the
step and its schedules; put the state back or start anew; train (`loop`); publish.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nimble_jobs.data.files import link_or_copy
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import CheckpointGone, Damaged, JobFailed, OutOfMemory
from nimble_jobs.models import permission
from nimble_jobs.models.classifier import write_config
from nimble_jobs.models.packed import Packed
from nimble_jobs.models.weights import save_weights
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.planner.step.build import TrainingStep
from nimble_jobs.planner.step.prepare import PreparedStep
from nimble_jobs.schedule import Schedule
from nimble_jobs.spec import JobSpec
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.context import JobContext, Outcome, Stop, Stopped
from nimble_jobs.workloads.score import already_published
from nimble_jobs.workloads.telling import tell_unchecked, tell_weights
from nimble_jobs.workloads.training.batches.bucketed import TextBatches, TextEpochs
from nimble_jobs.workloads.training.batches.epochs import Batches
from nimble_jobs.workloads.training.gauge import curves
from nimble_jobs.workloads.training.gauge.figures import Gauge, Steps
from nimble_jobs.workloads.training.gauge.journal import METRICS, Journal, check_tensorboard
from nimble_jobs.workloads.training.keep import resume
from nimble_jobs.workloads.training.keep.checkpoint import MODEL, Checkpoint, Checkpoints, read
from nimble_jobs.workloads.training.keep.keeper import Keeper
from nimble_jobs.workloads.training.keep.state import Progress, State, seed_random
from nimble_jobs.workloads.training.loop import Loop, Plan, Stages
from nimble_jobs.workloads.training.session import Session, opened
from nimble_jobs.workloads.training.step import prepare, setup, texts
from nimble_jobs.workloads.training.step.losses import make_loss
from nimble_jobs.workloads.training.step.prepare import Means
from nimble_jobs.workloads.training.step.setup import Setup
from nimble_jobs.workloads.training.step.texts import TrainTexts
from nimble_jobs.workloads.training.step.validation import Forward, SeveralForwards, Validation, replayable
from nimble_jobs.workloads.waiting import unless_stopped, waiting

CURVES, LAST = "curves.png", "last.safetensors"


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A module with its step and its validations, ready to run."""

    setup: Setup
    step: TrainingStep
    forward: Forward | SeveralForwards  # of validations
    summary: dict[str, Any]  # of the schedule, for `show`
    environment: dict[str, str]  # what equal bits depend on
    varying: tuple[str, ...]  # operators that stand against equal bits
    load_s: float
    build_s: float


def run(context: JobContext) -> Outcome:
    """Train on `input` and publish model.safetensors, metrics.jsonl and curves.png.

    An interrupted training goes on from its newest sound checkpoint. Raises DataError, ModelError, OutputExists,
    OutOfMemory, and JobFailed for a loss that is not finite.
    """
    device = devices.resolve(context.device)
    permission.check(context.spec.model, context.allowed_python)
    with opened(context, device) as session:
        if session.staging.finished is not None:
            session.checkpoints.clear()
            return already_published(context, session.staging)
        try:
            with as_in_training(device):
                return _run(session)
        except Stopped:
            return Outcome(stop=context.stop())
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e


def _run(session: Session) -> Outcome:
    context = session.context
    # Anything that the plan refuses needs no schedule.
    plan = Plan.of(session.spec, session.data, None if session.texts is None else session.texts.epochs)
    if plan.train.tensorboard:
        check_tensorboard()
    context.report(phase="load", total=plan.train.epochs * plan.epochs.sampler.records)
    kept = session.search.run()
    with _prepared(session, kept) as ready:
        state = State(ready.setup.module, ready.step, session.device)
        kept, progress, steps = _begin(session, state, kept)
        sheet, latest = session.sheet(ready.environment), None if kept is None else kept.step
        keeper = Keeper(
            session.checkpoints, state, plan.train.checkpoint, sheet, latest=latest, patience=context.patience
        )
        with closing(keeper), closing(_journal(session, ready, steps, tensorboard=plan.train.tensorboard)) as journal:
            journal.replay(progress.epochs)
            if kept is not None:
                total = plan.rate.steps
                resume.tell(context.event, kept, ready.environment, steps=total, varying=ready.varying)
            stop, timings = _train(session, plan, ready, progress, journal, keeper)
            files = context.patience.through(journal.finish) if stop is Stop.GO else []
    if stop is not Stop.GO:
        checkpoint = "no checkpoint" if plan.train.checkpoint is None else f"a checkpoint after step {progress.step}"
        text = f"after step {progress.step} of {plan.rate.steps}, with {checkpoint}"
        context.event("stopped", text, {"step": progress.step})
        return Outcome(stop=stop, schedule=ready.summary)
    _check_weights(state, progress, keeper)
    if plan.train.checkpoint is not None:
        timings |= {"checkpoints": keeper.written, "checkpoint_wait_s": keeper.stalled_s}
    context.report(done=len(progress.epochs) * plan.epochs.sampler.records)
    outputs = _publish(session, ready.setup, progress, steps, files)
    context.patience.through(session.checkpoints.clear)
    return Outcome(outputs=outputs, timings=timings, schedule=ready.summary)


@contextmanager
def _prepared(session: Session, kept: Checkpoint | None) -> Iterator[Ready]:
    """Load the model and prepare its schedules: for an interrupted training, those that it began with.

    Raises Stopped, ModelError, DataError, JobFailed, OutOfMemory, DeviceFault.
    """
    context, spec, device = session.context, session.spec, session.device
    ready = _set_up(session)
    tell_unchecked(context, ready.limits)
    _check_metrics(spec, ready.classes)
    varying = setup.unsteady(ready.request)
    if varying:
        text = f"{', '.join(varying)} can give different bits in each run on this device; a resumed training may differ"
        context.event("not-repeatable", text, {"operators": list(varying)})
    load_s = time.perf_counter() - session.began
    began_with = resume.began_with(kept, ready.request.options)
    prepared = prepare.prepare_steps(ready, _means(context), began_with=began_with)
    step = prepare.as_one(prepared)
    with closing(step), closing(_forward(ready, session.texts)) as forward:
        summary = prepare.summary_of_all(ready, prepared, device)
        validations: list[Schedule] = []
        if session.data.held_out is not None:
            if replayable(device):
                validations = _replay_validations(context, ready, prepared, forward)
            summary["validation"] = "schedule" if forward.replays else "eager"
        build_s = time.perf_counter() - session.began - load_s
        for one in prepared:
            prepare.tell_step(one, context.event, load_s=load_s, build_s=build_s / len(prepared))
        yield Ready(
            setup=ready,
            step=step,
            forward=forward,
            summary=summary,
            environment=resume.environment([one.step for one in prepared], validations, device),
            varying=varying,
            load_s=load_s,
            build_s=build_s,
        )


def _set_up(session: Session) -> Setup:
    """The module and what a step of it is. Raises ModelError, DataError, OutOfMemory, ModelChanged."""
    context, spec, device = session.context, session.spec, session.device
    if session.texts is None:
        return setup.prepare(spec, session.data.reader, device, context.allowed_python)
    return texts.prepare(spec, session.texts, device, context.allowed_python)


def _forward(ready: Setup, read: TrainTexts | None) -> Forward | SeveralForwards:
    """What validations call, in eager until it is captured."""
    if read is None:
        return Forward.of(ready)
    dtype = ready.spec.model.dtype
    layouts = [bucket.layout for bucket in read.epochs.buckets]
    modules = {layout.nbytes: Packed(ready.module, layout, torch.float32, ready.device) for layout in layouts}
    return SeveralForwards({width: Forward(module, dtype) for width, module in modules.items()})


def _replay_validations(
    context: JobContext, ready: Setup, prepared: Sequence[PreparedStep], forward: Forward | SeveralForwards
) -> list[Schedule]:
    """Capture what validations replay; the schedules of all that are replayed. Raises as `replay_validations`."""
    schedules = []
    for each, one in zip(ready.each, prepared, strict=True):
        mine = forward.by_width[each.request.x.shape[-1]] if isinstance(forward, SeveralForwards) else forward
        found = prepare.replay_validations(mine, each, one.step, _means(context))
        prepare.tell_validation(found, context.event)
        if mine.replays and found.schedule is not None:
            schedules.append(found.schedule)
    return schedules


def _means(context: JobContext) -> Means:
    report = unless_stopped(context)
    return Means(
        store=context.store,
        on_miss=context.spec.schedule.on_miss,
        report=report,
        trying=lambda _: report(phase="build"),
        waiting=waiting(context),
    )


def _begin(session: Session, state: State, kept: Checkpoint | None) -> tuple[Checkpoint | None, Progress, Steps]:
    """Restore the checkpoint or, if another job of this training has removed it, a newer one; else start anew."""
    while kept is not None:
        try:
            return kept, *state.restore(kept)
        except Damaged:
            if kept.path.exists():
                raise
            kept = session.search.run()
    tell_weights(session.context, setup.begins_with(session.spec))
    seed_random(session.spec.model.seed, session.device)
    return None, Progress(), Steps()


def _train(
    session: Session, plan: Plan, ready: Ready, progress: Progress, journal: Journal, keeper: Keeper
) -> tuple[Stop, dict[str, Any]]:
    """Run the loop; how it ended, and the attempt's timings. Raises what `Loop.run` raises."""
    context, held_out, validation = session.context, session.data.held_out, None
    if held_out is not None:
        loss = make_loss(plan.train, context.allowed_python, smoothing=False)
        validation = Validation(ready.setup, ready.forward, loss, records=held_out.total, event=context.event)
    context.report(phase="run", schedule=ready.summary)
    earlier, start = len(journal.steps), time.perf_counter()
    at = {"epoch": progress.epoch, "batch": progress.batch}
    with closing(_batches(plan, session.device, ready.setup, **at)) as batches:
        stages = Stages(
            batches=batches,
            step=ready.step,
            validation=validation,
            gauge=Gauge(ready.step, session.device, scaled=session.spec.model.dtype == "fp16"),
            journal=journal,
            keeper=keeper,
        )
        stop = Loop(plan, stages, progress, context.stop, _bad_records(session, progress)).run()
    run_s, steps = time.perf_counter() - start, len(journal.steps) - earlier
    return stop, {
        "load_s": ready.load_s,
        "build_s": ready.build_s,
        "run_s": run_s,
        "replays": steps if ready.summary["runs"] == "schedule" else 0,
        "steps_per_s": steps / run_s,
        "records_per_s": int(journal.steps.column("records")[earlier:].sum()) / run_s,
        **batches.meters.summary(),
    }


def _bad_records(session: Session, progress: Progress) -> BadRecords:
    """The count of bad records, which begins with those that earlier attempts found, each counted once."""
    reader, report, before = session.data.reader, session.context.report, progress.bad_in_order()
    return BadRecords(session.spec.run, reader.total, place=reader.place, report=report, before=before)


def _batches(plan: Plan, device: torch.device, ready: Setup, *, epoch: int, batch: int) -> Batches | TextBatches:
    if isinstance(plan.epochs, TextEpochs):
        return TextBatches(plan.epochs, device, epoch=epoch, batch=batch)
    return Batches(plan.epochs, device, ready.checks, epoch=epoch, batch=batch)


def _journal(session: Session, ready: Ready, steps: Steps, *, tensorboard: bool) -> Journal:
    context, path, classes = session.context, session.staging.file(METRICS), ready.setup.classes is not None
    report, event = context.report, context.event
    return context.patience.through(
        lambda: Journal(path, steps, classes=classes, tensorboard=tensorboard, report=report, event=event)
    )


def _publish(session: Session, ready: Setup, progress: Progress, steps: Steps, files: Sequence[str]) -> dict[str, Any]:
    """Publish weights, curves and bad records; `files` are those that the journal wrote beside metrics.jsonl.

    Raises DataError, and CheckpointGone if another job of this training has removed the best checkpoint.
    """
    context, staging, through = session.context, session.staging, session.context.patience.through
    context.report(phase="publish")
    if progress.best is None:
        through(lambda: save_weights(ready.module, staging.file(MODEL)))
    else:
        through(lambda: save_weights(ready.module, staging.file(LAST)))
        best = _best(session.checkpoints, progress.best["step"])
        through(lambda: link_or_copy(best.path / MODEL, staging.file(MODEL)))
        text = f"{MODEL} is from epoch {{epoch}}, with {{metric}} {{value:.4g}}; {LAST} is from the last epoch"
        context.event("best", text.format_map(progress.best), progress.best)
    for name in files:
        staging.file(name)
    if ready.names:
        folder = staging.file(MODEL).parent
        for name in through(lambda: write_config(ready.spec.model, folder, ready.names)):
            staging.file(name)
    if curves.available():
        last = progress.epochs[-1]
        title = f"{session.spec.name}: {last['step']} steps, {last['epoch']} epochs"
        through(lambda: curves.draw(staging.file(CURVES), steps.column("loss"), progress.epochs, title=title))
    else:
        context.event(
            "no-curves", f"{CURVES} is left out: matplotlib is not installed; pip install 'nimble-jobs[plots]'", {}
        )
    if progress.bad_records:
        through(lambda: staging.write_shard(0, {}, progress.bad_in_order(), last=True))
    summary = {"steps": progress.step, "metrics": progress.epochs[-1], "best": progress.best}
    if session.data.decode is not None:
        summary["decode"] = session.data.decode.to_json()
    return through(lambda: staging.publish(summary))


def _best(checkpoints: Checkpoints, step: int) -> Checkpoint:
    """The checkpoint of the best epoch. Raises Damaged, and CheckpointGone."""
    try:
        return read(checkpoints.path(step))
    except Damaged as e:
        if checkpoints.path(step).exists():
            raise
        raise CheckpointGone(f"{e}; another job of the same training ended and removed it") from e


def _check_metrics(spec: JobSpec, classes: int | None) -> None:
    """Raises JobFailed if the spec asks for accuracy, and labels are not classes of the model."""
    assert spec.train is not None
    checkpoint, stopping = spec.train.checkpoint, spec.train.early_stopping
    best = ("train.checkpoint.best", checkpoint and checkpoint.best)
    for field, metric in (best, ("train.early_stopping.metric", stopping and stopping.metric)):
        if classes is None and metric and str(metric).endswith("accuracy"):
            raise JobFailed(f"{field}: {metric} needs labels that are classes of the model; expected a loss")


def _check_weights(state: State, progress: Progress, keeper: Keeper) -> None:
    """Raises JobFailed if a weight is not finite after the last step, whose update no loss has shown."""
    broken = state.not_finite()
    if broken is not None:
        kept = "no checkpoint was kept" if keeper.path is None else f"the newest checkpoint is kept: {keeper.path}"
        raise JobFailed(
            f"the weights {broken} are not finite after step {progress.step}, the last one "
            f"(try a lower train.optimizer.lr); {kept}"
        )
