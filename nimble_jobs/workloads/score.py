"""Score every record of an input: read a batch, replay the schedule, write a shard, publish the folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from nimble_jobs.data import BadRecord, Batch, Reader, Staging, open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.models import permission, random_weights
from nimble_jobs.planner import Loaded, Prepared, Progress, Request, prepare
from nimble_jobs.planner.contest import faster_in_eager
from nimble_jobs.planner.limits import Limits, find_limits
from nimble_jobs.spec import JobSpec, ModelSpec
from nimble_jobs.workloads import moving, only_new
from nimble_jobs.workloads.basis import basis
from nimble_jobs.workloads.columns import Columns
from nimble_jobs.workloads.context import JobContext, Outcome, Stop, Stopped
from nimble_jobs.workloads.threshold import enforce_threshold
from nimble_jobs.workloads.waiting import waiting


@dataclass
class _Tally:
    done: int = 0
    bad: int = 0


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
        how = basis(spec, reader)
        staging = patience.through(
            lambda: Staging(spec.output, job.id, job.attempt, ledger=ledger, basis=how), begun=job.attempt > 1
        )
        context.report(total=reader.total)
        if staging.finished is not None:
            outcome = already_published(context, staging)
            return outcome if work is None else only_new.finish(context, outcome, work, {})
        if staging.begun_again is not None:
            message = (
                f"begins again with the first record: the model carries {staging.begun_again!r} from batch to batch"
            )
            context.event("restart", message, {})
        try:
            prepared = prepare(
                request_of(spec, reader, context.allowed_python, context.memory_bytes),
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
        tell(context, prepared)
        context.report(phase="run", schedule=prepared.summary())
        limits = _limits(context, prepared.loaded)
        shards = list(_shards(reader.total, spec.output.shard_size))
        adopted = sum(last - first for shard, (first, last) in enumerate(shards) if shard in staging.done)
        tally = _Tally(done=adopted, bad=len(staging.bad))
        start = time.perf_counter()
        try:
            for shard, (first, last) in enumerate(shards):
                if shard not in staging.done:
                    if context.stop() is not Stop.GO:
                        raise Stopped
                    at = moving.At(
                        record=first,
                        done=tally.done - adopted,
                        left=reader.total - first,
                        run_s=time.perf_counter() - start,
                    )
                    if moving.due(context, prepared, at):
                        prepared = moving.better(context, prepared, at)
                    columns, bad = _score(context, reader, prepared.loaded, first, last, tally, limits)
                    last_one = shard == len(shards) - 1
                    carries = prepared.loaded.altered()
                    patience.through(partial(staging.write_shard, shard, columns, bad, carries=carries, last=last_one))
            summary = prepared.summary()
        except Stopped:
            return Outcome(stop=context.stop(), schedule=prepared.summary())
        finally:
            if prepared.progress not in (None, Progress.MOVED):
                prepared.loaded.close()
        run_s = time.perf_counter() - start
        context.report(phase="publish", done=tally.done, bad=tally.bad)
        timings = {
            "load_s": prepared.load_s,
            "build_s": prepared.build_s,
            "run_s": run_s,
            "records_per_s": (tally.done - adopted) / run_s if run_s > 0 else None,
        }
        how_made = {"schedule": summary["key"], "runs": summary["runs"]}
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
    spec: JobSpec, reader: Reader, allowed_python: tuple[Path, ...] = (), memory_bytes: int | None = None
) -> Request:
    """What the job asks of the planner."""
    return Request(
        model=spec.model,
        shape=reader.signature.shape,
        dtype=reader.signature.dtype,
        batch_size=spec.input.batch_size,
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
    if loaded.request.input_dtype is not torch.int64:
        return Limits()
    if loaded.limits is None:
        loaded.limits = find_limits(loaded.module, loaded.request.input_shape, loaded.device)
    tell_unchecked(context, loaded.limits)
    return loaded.limits


def _shards(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, total)) for first in range(0, total, size))


def _score(
    context: JobContext,
    reader: Reader,
    loaded: Loaded,
    first: int,
    last: int,
    tally: _Tally,
    limits: Limits = Limits(),  # noqa: B008
) -> tuple[dict[str, np.ndarray | list[str]], list[BadRecord]]:
    columns = Columns(context.spec.output.fields)
    bad: list[BadRecord] = []  # of this shard, as read: batches in flight are not in the tally yet
    earlier = tally.bad

    def count(batch: Batch) -> None:
        tally.done += batch.stop - batch.start
        tally.bad += len(batch.bad)
        context.report(done=tally.done, bad=tally.bad)

    def whole_batches() -> Iterator[tuple[torch.Tensor, Batch]]:
        for read in reader.batches(first, last, batch_size=loaded.request.batch_size):
            if context.stop() in (Stop.CANCEL, Stop.TIMEOUT):
                raise Stopped
            batch = limits.sift(read, reader.place)
            bad.extend(batch.bad)
            enforce_threshold(context.spec.run, earlier + len(bad), reader.total, bad)
            if len(batch):
                yield _padded(batch, loaded.request), batch
            else:
                count(batch)

    for outputs, batch in loaded.run(whole_batches()):
        columns.add(outputs, batch.ids, batch.labels)
        count(batch)
    return columns.finish(), bad


def _padded(batch: Batch, request: Request) -> torch.Tensor:
    """The batch at its full size: the last row again and again where it is short, so that one schedule serves all."""
    x = batch.x
    if len(x) < request.batch_size:
        x = np.concatenate([x, np.repeat(x[-1:], request.batch_size - len(x), axis=0)])
    return torch.from_numpy(x if x.flags.writeable else x.copy())
