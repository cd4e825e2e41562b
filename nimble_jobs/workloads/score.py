"""Score every record of an input: read a batch, replay the schedule, write a shard, publish the folder."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from nimble_jobs.data import Reader, Staging, open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.models import permission, random_weights
from nimble_jobs.planner import Loaded, Prepared, Request, leave, prepare
from nimble_jobs.planner.module.limits import Limits, find_limits
from nimble_jobs.planner.search.contest import faster_in_eager
from nimble_jobs.spec import JobSpec, ModelSpec
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads import only_new
from nimble_jobs.workloads.basis import basis
from nimble_jobs.workloads.context import JobContext, Outcome, Stopped
from nimble_jobs.workloads.scoring import Scoring, Tally, shards_of
from nimble_jobs.workloads.waiting import waiting


def run(context: JobContext) -> Outcome:
    """Score `input.source` into `output.path`. Finished shards of earlier attempts are kept.

    Raises DataError, ModelError, OutputExists, OutOfMemory, FencedOut.
    """
    spec = context.spec
    permission.check(spec.model, context.allowed_python)  # before a resident of a job that was allowed more is found
    device = devices.resolve(context.device)
    work = only_new.choose(context, now=time.time()) if spec.input.only_new is not None else None
    if isinstance(work, Outcome):
        return work
    with open_reader(spec.input, files=work.files if work else None) as reader:
        job, ledger, patience = context.job, context.store.publications, context.patience
        decode, why_not = decodes.choose(spec, reader, device)
        how, decoded_by = basis(spec, reader, decode), str(decode) if decode is not None else None
        if context.decoders is not None:
            reader.hire(context.decoders)
        staging = patience.through(
            lambda: Staging(spec.output, job.id, job.attempt, ledger=ledger, basis=how, decoded_by=decoded_by),
            begun=job.attempt > 1,
        )
        context.report(total=reader.total)
        for note in reader.notes():
            context.event("input", note, {})
        if staging.finished is not None:
            outcome = already_published(context, staging)
            return outcome if work is None else only_new.finish(context, outcome, work, {})
        if staging.begun_again is not None:
            message = (
                f"begins again with the first record: the model carries {staging.begun_again!r} from batch to batch"
            )
            context.event("restart", message, {})
        if staging.decoded_before is not None:
            message = f"begins again with the first record: pictures were decoded by {staging.decoded_before} before"
            context.event("restart", message, {})
        try:
            prepared = prepare(
                request_of(spec, reader, device, context.allowed_python, context.memory_bytes),
                device=device,
                store=context.store,
                residents=context.residents,
                report=context.report,
                waiting=waiting(context),
                builders=context.builders,
            )
        except Stopped:
            return Outcome(stop=context.stop())
        tell_weights(context, spec.model)
        decodes.tell(context, decode, why_not)
        tell(context, prepared)
        context.report(phase="run", schedule=prepared.summary())
        limits = _limits(context, prepared.loaded)
        shards = shards_of(reader.total, spec.output.shard_size)
        adopted = sum(last - first for shard, (first, last) in enumerate(shards) if shard in staging.done)
        tally = Tally(done=adopted, bad=len(staging.bad))
        scoring = Scoring(
            context,
            reader,
            staging,
            prepared,
            shards=shards,
            tally=tally,
            limits=limits,
            decode=decodes.on_device(decode, reader, prepared.loaded, context.residents),
        )
        start = time.perf_counter()
        try:
            stages = scoring.run()
            summary = scoring.prepared.summary()
        except Stopped:
            return Outcome(stop=context.stop(), schedule=scoring.prepared.summary())
        finally:
            leave(scoring.prepared, context.residents)
        if context.decoders is not None and context.decoders.trouble is not None and decode is not None:
            context.event("fallback", context.decoders.trouble, {})
        run_s = time.perf_counter() - start
        context.report(phase="publish", done=tally.done, bad=tally.bad)
        timings = {
            "load_s": prepared.load_s,
            "build_s": prepared.build_s,
            "run_s": run_s,
            "records_per_s": (tally.done - adopted) / run_s if run_s > 0 else None,
            **stages,
        }
        how_made = {"schedule": summary["key"], "runs": summary["runs"]}
        if decode is not None:
            how_made["decode"] = decode.to_json()
        left = {} if work is None else only_new.left_over(work, reader, staging.bad)
        if work is not None:
            how_made["only_new"] = work.summary(left)
        outputs = patience.through(lambda: staging.publish(how_made, shards=len(shards)))
    outcome = Outcome(outputs=outputs, timings=timings, schedule=summary)
    return outcome if work is None else only_new.finish(context, outcome, work, left)


def already_published(context: JobContext, staging: Staging) -> Outcome:
    """The output is there: an earlier attempt died between publishing it and saying so, or it is being resumed."""
    assert staging.finished is not None
    context.event("published", f"{staging.finished['path']} holds this job's output already", {})
    context.report(done=staging.finished["records"] + staging.finished["bad"], bad=staging.finished["bad"])
    return Outcome(outputs=context.patience.through(lambda: staging.publish({})))


def request_of(
    spec: JobSpec,
    reader: Reader,
    device: torch.device,
    allowed_python: tuple[Path, ...] = (),
    memory_bytes: int | None = None,
) -> Request:
    """What the job asks of the planner."""
    return Request(
        model=spec.model,
        shape=reader.signature.shape,
        dtype=reader.signature.dtype,
        batch_size=spec.input.batch_size,
        preprocess=reader.preprocess if devices.separate_memory(device) else None,
        schedule=spec.schedule,
        embedding="embedding" in spec.output.fields,
        allowed_python=allowed_python,
        memory_bytes=memory_bytes,
    )


def tell_weights(context: JobContext, model: ModelSpec) -> None:
    """Record that the weights are random: a forgotten `model.weights` must not look like a result."""
    made = random_weights(model)
    if made is not None:
        context.event("weights", made, {"seed": model.seed})


def tell_unchecked(context: JobContext, limits: Limits) -> None:
    """Record why numbers out of range will not be found before the model meets them, if so."""
    if limits.unchecked is not None:
        context.event("unchecked", f"the input is not checked for numbers out of range: {limits.unchecked}", {})


def tell(context: JobContext, prepared: Prepared) -> None:
    """Record how the job came by its schedule, and any fallback."""
    loaded = prepared.loaded
    if loaded.fallback is not None:
        context.event("fallback", f"runs in eager: {loaded.fallback}", {"key": loaded.key})
        return
    reason = f" ({prepared.miss_reason})" if prepared.miss_reason else ""
    context.event(
        "schedule",
        f"{prepared.hit.value} {loaded.key[:12]}{reason}: load {prepared.load_s:.3f} s, build {prepared.build_s:.3f} s"
        + faster_in_eager(loaded.schedule),
        {"key": loaded.key, "hit": prepared.hit.value},
    )


def _limits(context: JobContext, loaded: Loaded) -> Limits:
    """What the model's whole numbers must lie between. Raises OutOfMemory."""
    if not loaded.request.whole:
        return Limits()
    if loaded.limits is None:
        loaded.limits = find_limits(loaded.module, loaded.request.input_shape, loaded.device)
    tell_unchecked(context, loaded.limits)
    return loaded.limits
