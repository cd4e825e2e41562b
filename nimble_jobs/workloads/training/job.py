"""Fine-tune a model on labelled records: from a spec to published weights, through any number of attempts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nimble_jobs import spec as specs
from nimble_jobs.data import BadRecord, Reader, Staging, open_reader
from nimble_jobs.data.files import link_or_copy
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import CheckpointGone, Damaged, DataError, JobFailed, OutOfMemory
from nimble_jobs.job import Hit
from nimble_jobs.models import permission
from nimble_jobs.models.weights import save_weights
from nimble_jobs.planner.keys.step import program_key
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.planner.search.contest import faster_in_eager
from nimble_jobs.planner.step.build import EagerStep, TrainingStep
from nimble_jobs.planner.step.prepare import PreparedStep, eager_by_choice, prepare_stored_step
from nimble_jobs.schedule import Schedule
from nimble_jobs.spec import JobSpec
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads.basis import basis_parts, digest
from nimble_jobs.workloads.context import JobContext, Outcome, Stop, Stopped
from nimble_jobs.workloads.decode import Decode
from nimble_jobs.workloads.score import already_published, tell_unchecked, tell_weights
from nimble_jobs.workloads.training import board, checkpoint, curves, random_state, resume, setup
from nimble_jobs.workloads.training.augment import Augment
from nimble_jobs.workloads.training.checkpoint import MODEL, Checkpoint
from nimble_jobs.workloads.training.checkpoints import Checkpoints
from nimble_jobs.workloads.training.figures import Steps
from nimble_jobs.workloads.training.forward import REPLAYED_ON, Forward, have_replayed
from nimble_jobs.workloads.training.journal import METRICS, Journal
from nimble_jobs.workloads.training.keeper import Keeper, restore
from nimble_jobs.workloads.training.learning_rate import LearningRate
from nimble_jobs.workloads.training.loop import Loop, steps_of
from nimble_jobs.workloads.training.losses import targets
from nimble_jobs.workloads.training.progress import Progress
from nimble_jobs.workloads.training.sampler import Sampler
from nimble_jobs.workloads.training.unsteady import unsteady
from nimble_jobs.workloads.waiting import unless_stopped, waiting

CURVES, LAST = "curves.png", "last.safetensors"


def run(context: JobContext) -> Outcome:
    """Train on `input` and publish model.safetensors, metrics.jsonl and curves.png.

    An interrupted training goes on from its newest sound checkpoint. Raises DataError, ModelError, OutputExists,
    OutOfMemory, and JobFailed for a loss that is not finite.
    """
    spec = context.spec
    assert spec.train is not None  # the spec's rules see to it
    device = devices.resolve(context.device)
    permission.check(spec.model, context.allowed_python)
    start = time.perf_counter()
    with open_reader(spec.input, targets=targets(spec.train.loss)) as reader, _held_out(spec, reader) as held_out:
        if not reader.has_labels:
            raise DataError("input.fields.label: fine-tuning needs labels; the input has none")
        for note in reader.notes(shuffled=True):
            context.event("input", note, {})
        decode, why_not = decodes.choose(spec, reader, device)
        for each in (reader, held_out):
            if each is not None and context.decoders is not None:
                each.hire(context.decoders)
        parts = basis_parts(spec, reader, held_out, decode=decode)
        basis = digest(parts)
        job, ledger = context.job, context.store.publications
        staging = context.patience.through(
            lambda: Staging(spec.output, job.id, job.attempt, ledger=ledger, basis=basis), begun=job.attempt > 1
        )
        key = basis[:16] if spec.train.resume != "never" else f"{basis[:16]}-{context.job.id}"
        checkpoints = Checkpoints(spec.output.path, key, owner=context.job.id)
        if staging.finished is not None:
            checkpoints.clear()
            return already_published(context, staging)
        decodes.tell(context, decode, why_not)
        sheet = {
            "basis": basis,
            "parts": parts,
            "spec": specs.dump(spec),
            "job": {"id": context.job.id, "attempt": context.job.attempt},
        }
        try:
            with as_in_training(device):
                return _trained(context, reader, held_out, staging, checkpoints, sheet, device, start, decode)
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e


def _trained(
    context: JobContext,
    reader: Reader,
    held_out: Reader | None,
    staging: Staging,
    checkpoints: Checkpoints,
    sheet: dict[str, Any],
    device: torch.device,
    start: float,
    decode: Decode | None,
) -> Outcome:
    spec = context.spec
    train = spec.train
    assert train is not None
    sampler = Sampler(reader.total, spec.input.batch_size, seed=spec.model.seed, last_batch=train.last_batch)
    if not sampler.batches:
        raise DataError(
            f"train.last_batch: drop leaves nothing of {reader.total} records in batches of {spec.input.batch_size}"
        )
    LearningRate(train.lr_schedule, train.optimizer.lr, steps_of(train, sampler))  # what these refuse needs no schedule
    Augment(train.augment, reader.signature, seed=spec.model.seed, decodes=reader.decodes)
    if train.tensorboard:
        board.check()
    context.report(phase="load", total=sampler.records * train.epochs)
    found = resume.find(context, checkpoints, sheet)
    ready = setup.prepare(spec, reader, device, context.allowed_python)
    tell_unchecked(context, ready.limits)
    _check_metrics(spec, ready.classes)
    varying = unsteady(ready.request, device)
    if varying:
        text = f"{', '.join(varying)} may give other bits each time on this device; a resume would not be bit for bit"
        context.event("not-repeatable", text, {"operators": list(varying)})
    load_s = time.perf_counter() - start
    try:
        prepared = _step(context, ready, found, device)
    except Stopped:
        return Outcome(stop=context.stop())
    step = prepared.step
    with ExitStack() as opened:
        opened.callback(step.close)
        summary = _summary(prepared, device)
        forward = Forward(ready.module, spec.model.dtype)
        opened.callback(forward.close)
        validation = None
        try:
            if held_out is not None and device.type in REPLAYED_ON:
                validation = _replay_validations(forward, context, ready, step)
        except Stopped:
            return Outcome(stop=context.stop())
        if held_out is not None:
            summary["validation"] = "schedule" if forward.replays else "eager"
        build_s = time.perf_counter() - start - load_s
        _tell(context, prepared, load_s, build_s)
        sheet["environment"] = resume.environment(step, validation, device)
        found, progress, steps = _begin(context, ready, step, found, checkpoints, sheet, device)
        keeper = None
        if train.checkpoint is not None:
            keeper = Keeper(
                checkpoints,
                ready.module,
                step,
                device,
                keep_last=train.checkpoint.keep_last,
                found=found,
                patience=context.patience,
            )
            opened.callback(keeper.close)
        journal = _journal(context, staging, ready)
        opened.callback(journal.close)
        journal.replay(steps, progress.epochs)
        loop = Loop(
            context,
            ready,
            step,
            forward,
            reader=reader,
            held_out=held_out,
            keeper=keeper,
            sheet=sheet,
            progress=progress,
            steps=steps,
            journal=journal,
            sampler=sampler,
            decode_on_device=decode is not None and decode.by == "gpu",
        )
        if found is not None:
            resume.tell(context, found, sheet["environment"], steps=loop.total, varying=varying)
        context.report(phase="run", schedule=summary)
        earlier, began = len(steps), time.perf_counter()
        stop = loop.run()
        written = _finish(context, journal, stop)
    run_s = time.perf_counter() - began
    if stop is not Stop.GO:
        kept = "no checkpoint" if keeper is None else f"a checkpoint after step {progress.step}"
        context.event("stopped", f"after step {progress.step} of {loop.total}, with {kept}", {"step": progress.step})
        return Outcome(stop=stop, schedule=summary)
    _check_weights(ready, progress, keeper)
    timings = {
        "load_s": load_s,
        "build_s": build_s,
        "run_s": run_s,
        "steps_per_s": (len(steps) - earlier) / run_s,
        "records_per_s": int(steps.column("records")[earlier:].sum()) / run_s,
        **loop.stages.summary(),
    }
    if keeper is not None:
        timings |= {"checkpoints": keeper.written, "checkpoint_wait_s": keeper.stalled_s}
    context.report(done=sampler.records * len(progress.epochs))
    outputs = _publish(context, staging, checkpoints, ready, progress, steps, written, decode)
    context.patience.through(checkpoints.clear)
    return Outcome(outputs=outputs, timings=timings, schedule=summary)


def _step(context: JobContext, ready: setup.Setup, found: Checkpoint | None, device: torch.device) -> PreparedStep:
    """A new training's best one, or the one that the checkpoint's training began with; stored, or built now."""
    request = ready.request
    only = resume.source_of(found, request.options)
    if only == "eager":
        by_choice = eager_by_choice(request, ready.parts, device=device, store=context.store)
        if by_choice is not None:
            return by_choice
        step = EagerStep(request, device, fallback="the training began in eager, and goes on exactly")
        return PreparedStep(step=step, key=program_key(ready.parts, update=True), hit=Hit.MISS)
    return prepare_stored_step(
        replace(request, only=only),
        ready.parts,
        device=device,
        store=context.store,
        on_miss=context.spec.schedule.on_miss,
        check_code=lambda: ready.check_code(context.spec),
        report=unless_stopped(context),
        waiting=waiting(context),
    )


def _replay_validations(
    forward: Forward, context: JobContext, ready: setup.Setup, step: TrainingStep
) -> Schedule | None:
    """The schedule, if that is possible. An event says how it was come by, or why there is none."""
    spec, report = context.spec, unless_stopped(context)
    found = have_replayed(
        forward,
        ready,
        step,
        on_miss=spec.schedule.on_miss,
        store=context.store,
        check_code=lambda: ready.check_code(spec),
        told=lambda _: report(phase="build"),
        waiting=waiting(context),
    )
    if found.failure is not None:
        context.event("fallback", f"validation runs in eager: {found.failure}", {"key": found.key})
        return None
    if found.instance is None:
        context.event("schedule", "validation: eager is faster here", {"key": found.key, "hit": found.hit.value})
        return None
    reason = f" ({found.miss_reason})" if found.miss_reason else ""
    data = {"key": found.key, "hit": found.hit.value}
    context.event("schedule", f"validation: {found.hit.value} {found.key[:12]}{reason}", data)
    return found.schedule


def _begin(
    context: JobContext,
    ready: setup.Setup,
    step: TrainingStep,
    found: Checkpoint | None,
    checkpoints: Checkpoints,
    sheet: dict[str, Any],
    device: torch.device,
) -> tuple[Checkpoint | None, Progress, Steps]:
    """The first step's state, or that of a checkpoint: a newer one where another job took the found one away."""
    while found is not None:
        try:
            return found, *restore(found, ready.module, step, device)
        except Damaged:
            if found.path.exists():
                raise
            found = resume.find(context, checkpoints, sheet)
    tell_weights(context, setup.begins_with(context.spec))
    random_state.seed_all(context.spec.model.seed, device)
    return None, Progress(), Steps()


def _check_weights(ready: setup.Setup, progress: Progress, keeper: Keeper | None) -> None:
    """The last step's update shows in no loss. Raises JobFailed where a weight is not finite after it."""
    named = ((name, p) for name, p in ready.module.named_parameters() if p.requires_grad)
    broken = next((name for name, p in named if not p.isfinite().all()), None)
    if broken is not None:
        path = keeper.path if keeper is not None else None
        kept = "no checkpoint was kept" if path is None else f"the newest checkpoint is kept: {path}"
        raise JobFailed(
            f"the weights {broken} are not finite after step {progress.step}, the last one "
            f"(a lower train.optimizer.lr?); {kept}"
        )


def _publish(
    context: JobContext,
    staging: Staging,
    checkpoints: Checkpoints,
    ready: setup.Setup,
    progress: Progress,
    steps: Steps,
    written: list[str],
    decode: Decode | None,
) -> dict[str, Any]:
    context.report(phase="publish")
    through = context.patience.through
    if progress.best is None:
        through(lambda: save_weights(ready.module, staging.file(MODEL)))
    else:
        through(lambda: save_weights(ready.module, staging.file(LAST)))
        best = _best(checkpoints, progress.best["step"])
        through(lambda: link_or_copy(best.path / MODEL, staging.file(MODEL)))
        text = f"{MODEL} is of epoch {{epoch}}, with {{metric}} {{value:.4g}}; {LAST} is of the last epoch"
        context.event("best", text.format_map(progress.best), progress.best)
    for name in written:
        staging.file(name)
    if curves.available():
        last = progress.epochs[-1]
        title = f"{context.spec.name}: {last['step']} steps, {last['epoch']} epochs"
        through(lambda: curves.draw(staging.file(CURVES), steps.column("loss"), progress.epochs, title=title))
    else:
        context.event("no-curves", f"{CURVES} is left out: matplotlib is missing; it comes with nimble-jobs[plots]", {})
    if progress.bad_records:
        bad = [BadRecord(index=int(i), id=name, reason=why) for i, (name, why) in progress.bad_records.items()]
        bad.sort(key=lambda record: record.index)
        through(lambda: staging.write_shard(0, {}, bad, last=True))
    summary = {"steps": progress.step, "metrics": progress.epochs[-1], "best": progress.best}
    if decode is not None:
        summary["decode"] = decode.to_json()
    return through(lambda: staging.publish(summary))


def _journal(context: JobContext, staging: Staging, ready: setup.Setup) -> Journal:
    assert context.spec.train is not None
    make = partial(
        Journal,
        staging.file(METRICS),
        classes=ready.classes is not None,
        tensorboard=context.spec.train.tensorboard,
        report=context.report,
        event=context.event,
    )
    return context.patience.through(make)


def _finish(context: JobContext, journal: Journal, stop: Stop) -> list[str]:
    """Write the rest of the journal of a training that has ended; its files beside metrics.jsonl."""
    if stop is not Stop.GO:
        return []
    context.patience.through(journal.flush)
    return journal.finish()


def _best(checkpoints: Checkpoints, step: int) -> Checkpoint:
    """That of the best epoch. Raises Damaged, CheckpointGone where another job of this training removed it."""
    try:
        return checkpoint.read(checkpoints.path(step))
    except Damaged as e:
        if checkpoints.path(step).exists():
            raise
        raise CheckpointGone(f"{e}; another job of the same training ended and removed it") from e


@contextmanager
def _held_out(spec: JobSpec, reader: Reader) -> Iterator[Reader | None]:
    """The records of `train.validation`, if it is given. Raises DataError where they do not fit the input."""
    assert spec.train is not None
    if spec.train.validation is None:
        yield None
        return
    source = spec.input.model_copy(update={"source": spec.train.validation.source})
    with open_reader(source, label_names=reader.label_names, targets=targets(spec.train.loss)) as held_out:
        if held_out.signature != reader.signature:
            raise DataError(
                f"train.validation.source: records are {held_out.signature.dtype} {list(held_out.signature.shape)}; "
                f"expected {reader.signature.dtype} {list(reader.signature.shape)}, as the input's"
            )
        yield held_out


def _check_metrics(spec: JobSpec, classes: int | None) -> None:
    assert spec.train is not None
    named = {
        "train.checkpoint.best": spec.train.checkpoint and spec.train.checkpoint.best,
        "train.early_stopping.metric": spec.train.early_stopping and spec.train.early_stopping.metric,
    }
    for field, metric in named.items():
        if classes is None and metric and str(metric).endswith("accuracy"):
            raise JobFailed(f"{field}: {metric} needs labels that are classes of the model; expected a loss")


def _tell(context: JobContext, prepared: PreparedStep, load_s: float, build_s: float) -> None:
    """Record how the job came by its schedule, or why it has none."""
    key, fallback = prepared.key, prepared.step.fallback
    if fallback is not None:
        context.event("fallback", f"runs in eager: {fallback}", {"key": key})
        return
    reason = f" ({prepared.miss_reason})" if prepared.miss_reason else ""
    said = f"{prepared.hit.value} {key[:12]}{reason}: load {load_s:.3f} s, build {build_s:.3f} s"
    said += faster_in_eager(prepared.step.schedule)
    context.event("schedule", said, {"key": key, "hit": prepared.hit.value})


def _summary(prepared: PreparedStep, device: torch.device) -> dict[str, Any]:
    """What `show` prints of the schedule."""
    step = prepared.step
    found: dict[str, Any] = {
        "key": prepared.key,
        "hit": prepared.hit.value,
        "runs": "eager" if step.schedule is None else step.schedule.runs,
        "fallback": step.fallback,
        "eager_is_faster": step.schedule is not None and step.schedule.runs == "eager",
        "miss_reason": prepared.miss_reason,
        "device": devices.describe(device),
    }
    if step.schedule is not None:
        schedule = step.schedule
        found |= {
            "tasks": schedule.facts.tasks,
            "kernels": schedule.kernels,
            "layout": schedule.layout,
            "streams": schedule.plan.streams,
            "syncs": len(schedule.plan.syncs),
            "replay_us": schedule.replay_us,
            "eager_us": schedule.eager_us,
            "noise": schedule.noise,
            "error": schedule.error,
            "tolerance": schedule.tolerance,
            "peak_bytes": schedule.peak_bytes,
        }
    return found
