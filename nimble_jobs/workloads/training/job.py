"""Fine-tune a model on labelled records: from a spec to published weights, through any number of attempts.

The phases of an attempt: open the data and claim the output (`session`); find the checkpoint to go on from; prepare the
step and its schedules; put the state back or start anew; train (`loop`); publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch

from nimble_jobs.data.files import link_or_copy
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import CheckpointGone, Damaged, JobFailed, OutOfMemory
from nimble_jobs.models import permission
from nimble_jobs.models.classes import write_classes
from nimble_jobs.models.classifier import write_config
from nimble_jobs.models.weights import save_weights
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.workloads.context import JobContext, Outcome, Stop, Stopped
from nimble_jobs.workloads.score import already_published
from nimble_jobs.workloads.telling import tell_weights
from nimble_jobs.workloads.text.publish import write_tokenizer
from nimble_jobs.workloads.training.attempt import Ready, prepared, train
from nimble_jobs.workloads.training.batches.together import Share
from nimble_jobs.workloads.training.gathering import started
from nimble_jobs.workloads.training.gauge import curves
from nimble_jobs.workloads.training.gauge.figures import Steps
from nimble_jobs.workloads.training.gauge.journal import METRICS, Journal, check_tensorboard
from nimble_jobs.workloads.training.keep import resume
from nimble_jobs.workloads.training.keep.checkpoint import MODEL, Checkpoint, Checkpoints, read
from nimble_jobs.workloads.training.keep.keeper import Keeper
from nimble_jobs.workloads.training.keep.shared import SharedKeeper, check_same
from nimble_jobs.workloads.training.keep.state import Progress, State, seed_random
from nimble_jobs.workloads.training.loop import Plan
from nimble_jobs.workloads.training.session import Session, opened
from nimble_jobs.workloads.training.step import setup
from nimble_jobs.workloads.training.step.setup import Setup, cores_shared, ranks_of
from nimble_jobs.workloads.whole_numbers import naming_whole_numbers

CURVES, LAST = "curves.png", "last.safetensors"


def run(context: JobContext) -> Outcome:
    """Train on `input` and publish model.safetensors, metrics.jsonl and curves.png.

    An interrupted training goes on from its newest sound checkpoint. Raises DataError, ModelError, OutputExists,
    OutOfMemory, and JobFailed for a loss that is not finite.
    """
    device = devices.resolve(context.device)
    permission.check(context.spec.model, context.allowed_python)
    with cores_shared(context.spec, device), opened(context, device) as session:
        if session.staging.finished is not None:
            session.checkpoints.clear()
            return already_published(context, session.staging)
        try:
            with as_in_training(device), naming_whole_numbers(session.spec, session.data.reader):
                return _run(session)
        except Stopped:
            return Outcome(stop=context.stop())
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e


def _run(session: Session) -> Outcome:
    context, several = session.context, ranks_of(session.spec)
    # Anything that the plan refuses needs no schedule.
    share = Share() if several is None else Share(0, several.count)
    plan = Plan.of(session.spec, session.data, None if session.texts is None else session.texts.epochs, share)
    if plan.train.tensorboard:
        check_tensorboard()
    context.report(phase="load", total=plan.train.epochs * plan.epochs.sampler.records)
    kept = session.search.run()
    on_miss, kinds = session.spec.schedule.on_miss, partial(resume.began_with, kept)
    with (
        nullcontext() if several is None else started(session, several.count) as team,
        prepared(session, kinds, on_miss=on_miss, team=team) as ready,
    ):
        state, gang = State(ready.setup.module, ready.step, session.device), ready.gang
        kept, progress, steps = _begin(session, state, kept)
        if gang is not None:
            gang.gather(None if kept is None else str(kept.path))
            check_same(gang, state, progress.step)
        sheet, latest = session.sheet(ready.environment), None if kept is None else kept.step
        writer = Keeper(
            session.checkpoints, state, plan.train.checkpoint, sheet, latest=latest, patience=context.patience
        )
        keeper = writer if gang is None else SharedKeeper(gang, state, writer)
        with closing(writer), closing(_journal(session, ready, steps, tensorboard=plan.train.tensorboard)) as journal:
            journal.replay(progress.epochs)
            if kept is not None:
                inexact = resume.inexact(ready.varying, ready.remembered)
                resume.tell(context.event, kept, ready.environment, steps=plan.rate.steps, inexact=inexact)
            stop, timings = train(session, plan, ready, progress, journal, keeper)
            files = context.patience.through(journal.finish) if stop is Stop.GO else []
    if stop is not Stop.GO:
        checkpoint = "no checkpoint" if plan.train.checkpoint is None else f"a checkpoint after step {progress.step}"
        text = f"after step {progress.step} of {plan.rate.steps}, with {checkpoint}"
        context.event("stopped", text, {"step": progress.step})
        return Outcome(stop=stop, schedule=ready.summary)
    _check_weights(state, progress, writer)
    if plan.train.checkpoint is not None:
        timings |= {"checkpoints": writer.written, "checkpoint_wait_s": writer.stalled_s}
    context.report(done=len(progress.epochs) * plan.epochs.sampler.records)
    outputs = _publish(session, ready.setup, progress, steps, files)
    context.patience.through(session.checkpoints.clear)
    publication = session.staging.publication
    return Outcome(outputs=outputs, timings=timings, schedule=ready.summary, publication=publication)


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
    if left_out := session.search.parts.get("left_out"):
        text = (
            f"{left_out} record is left out of each epoch, another one each time: the last batch would hold no other, "
            "and statistics over a batch need two"
        )
        session.context.event("left-out", text, {"records": left_out})
    seed_random(session.spec.model.seed, session.device)
    return None, Progress(), Steps()


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
        _tell_no_best(session)
    else:
        through(lambda: save_weights(ready.module, staging.file(LAST)))
        best = _best(session.checkpoints, progress.best["step"])
        through(lambda: link_or_copy(best.path / MODEL, staging.file(MODEL)))
        text = f"{MODEL} is from epoch {{epoch}}, with {{metric}} {{value:.4g}}; {LAST} is from the last epoch"
        context.event("best", text.format_map(progress.best), progress.best)
    for name in files:
        staging.file(name)
    names = ready.names or session.data.reader.label_names
    if session.texts is None and names is not None:
        staging.file(through(lambda: write_classes(staging.file(MODEL).parent, names)))
    if session.texts is not None:
        folder, texts = staging.file(MODEL).parent, session.texts
        staging.file(through(lambda: write_config(ready.spec.model, folder, ready.names)))
        for name in through(lambda: write_tokenizer(texts.setup, folder)):
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
    if names is not None:
        summary["classes"] = list(names)
    if session.data.decode is not None:
        summary["decode"] = session.data.decode.to_json()
    return through(lambda: staging.publish(summary))


def _tell_no_best(session: Session) -> None:
    train = session.spec.train
    if train is not None and train.checkpoint is not None and (best := train.checkpoint.best) is not None:
        text = f"{MODEL} is from the last epoch, because {best} was not a number in any epoch"
        session.context.event("no-best", text, {"metric": best})


def _best(checkpoints: Checkpoints, step: int) -> Checkpoint:
    """The checkpoint of the best epoch. Raises Damaged, and CheckpointGone."""
    try:
        return read(checkpoints.path(step))
    except Damaged as e:
        if checkpoints.path(step).exists():
            raise
        raise CheckpointGone(f"{e}; another job of the same training ended and removed it") from e


def _check_weights(state: State, progress: Progress, keeper: Keeper) -> None:
    """Raises JobFailed if a weight is not finite after the last step, whose update no loss has shown."""
    broken = state.not_finite()
    if broken is not None:
        kept = "no checkpoint was kept" if keeper.path is None else f"the newest checkpoint is kept: {keeper.path}"
        raise JobFailed(
            f"the weights {broken} are not finite after step {progress.step}, the last one "
            f"(try a lower train.optimizer.lr); {kept}"
        )
