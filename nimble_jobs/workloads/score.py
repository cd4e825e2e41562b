"""Score every record of an input: read a batch, replay the schedule, write a shard, publish the folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nimble_jobs.data import AnyStaging
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.private.compilers import keeping_compilers
from nimble_jobs.models import permission
from nimble_jobs.planner import Loaded, Siblings, leave, prepare
from nimble_jobs.planner.module.limits import Limits, find_limits
from nimble_jobs.workloads import decode as decodes
from nimble_jobs.workloads import only_new
from nimble_jobs.workloads.answering import requests_in
from nimble_jobs.workloads.attempt import Attempt, claimed, opened
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.claimed_ahead import in_a_row
from nimble_jobs.workloads.context import JobContext, Outcome, Stop, Stopped
from nimble_jobs.workloads.cuts import cut, cut_claims, shards_for
from nimble_jobs.workloads.early_buffers import EarlyBuffers
from nimble_jobs.workloads.first_batch import explaining
from nimble_jobs.workloads.parts import Feed, Lane
from nimble_jobs.workloads.record_feed import RecordFeed, Turn, memory_of
from nimble_jobs.workloads.scoring import Ends, Scoring, Tally
from nimble_jobs.workloads.stages import Stages
from nimble_jobs.workloads.telling import tell, tell_published, tell_restart, tell_unchecked, tell_weights
from nimble_jobs.workloads.text import job as text
from nimble_jobs.workloads.text.feed import Counts
from nimble_jobs.workloads.text.per_token import per_token
from nimble_jobs.workloads.text.setup import ColumnOfText, TextSetup
from nimble_jobs.workloads.text.windows import spans
from nimble_jobs.workloads.waiting import waiting
from nimble_jobs.workloads.whole_numbers import naming_whole_numbers


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
    column = ColumnOfText(spec)
    with opened(context, work, column) as reader:
        attempt = claimed(context, device, reader, work, column)
        explained = explaining(spec, reader, attempt.texts or column.setup, context.allowed_python)
        with naming_whole_numbers(spec, reader), explained:
            outcome, left = _scored(attempt)
    if work is None or outcome.left or outcome.stop is not Stop.GO:
        return outcome
    return only_new.finish(context, outcome, work, left)


def _scored(attempt: Attempt) -> tuple[Outcome, dict[str, str]]:
    """Prepare the model, score, publish; how that ended, and which files are left for the next job."""
    context, staging, part = attempt.context, attempt.staging, attempt.part
    if staging is not None:
        if staging.finished is not None:
            return already_published(context, staging), {}
        tell_restart(context, staging)
    plan = _planned(attempt)
    try:
        with EarlyBuffers(_early_memory(attempt), attempt.device) as early:
            scoring, again, counts = _ready(attempt, plan, early)
    except Stopped:
        return Outcome(stop=context.stop()), {}
    context.report(phase="run", schedule=scoring.prepared.summary())
    loads, builds = (sum(getattr(lane.prepared, name) for lane in scoring.lanes) for name in ("load_s", "build_s"))
    try:
        stages = _run(attempt, scoring, again)
        run_s = time.perf_counter() - scoring.began
        summary, how_made = scoring.prepared.summary(), dict[str, Any]()
        if plan is not None and counts is not None:
            stages["text"] = text.figures(counts, plan, scoring.lanes, run_s)
            summary["buckets"] = stages["text"].pop("buckets")
            how_made["text"] = plan.setup.to_json()
            text.tell_figures(context, stages["text"])
        elif (setup := attempt.column.setup) is not None:
            said = {"truncated": attempt.column.cut, "records": scoring.scored, "max_length": setup.limit}
            how_made["text"] = _of_texts(setup, said, attempt.reader.total)
            text.tell_figures(context, said)
    except Stopped:
        return Outcome(stop=context.stop(), schedule=scoring.prepared.summary()), {}
    finally:
        leave([lane.prepared for lane in scoring.lanes], context.residents)
    if context.decoders is not None and context.decoders.trouble is not None and attempt.decode is not None:
        context.event("fallback", context.decoders.trouble, {})
    timings = {
        "load_s": loads + scoring.ready_s,
        "build_s": builds,
        "run_s": run_s,
        "replays": scoring.replays,
        "records_per_s": _counted(attempt, scoring) / run_s if run_s > 0 else None,
        **stages,
    }
    if part is not None:
        if not part.publishes():
            return Outcome(left=True), {}
        staging = staging or attempt.stage()
        part.complete(staging, attempt.reader, scoring.shards)
        timings["records_per_s"] = part.rate()
        context.report(bad_kinds=_bad_records(attempt, staging).kinds())
        scoring.tally.done = attempt.reader.total
    assert staging is not None
    if plan is not None:
        how_made["text"]["truncated"] = staging.shortened
    outputs, left = _published(attempt, staging, scoring.tally, summary, how_made)
    publication = staging.publication
    return Outcome(outputs=outputs, timings=timings, schedule=summary, publication=publication), left


def _run(attempt: Attempt, scoring: Scoring, again: Callable[[], Feed]) -> dict[str, Any]:
    """Score all records, or this member's part of them; figures of the stages. Raises Stopped."""
    if attempt.part is not None:
        return attempt.part.run(scoring, again)
    stages = scoring.run()
    if attempt.context.fetching is not None:
        attempt.context.fetching.finish()  # nothing is published before all objects are those that were listed
    return stages


def _counted(attempt: Attempt, scoring: Scoring) -> int:
    """How many records this attempt scored; of a batch file, requests."""
    if attempt.answers is None:
        return scoring.scored
    fresh = (bounds for shard, bounds in enumerate(scoring.shards) if shard not in scoring.tally.shards)
    return requests_in(attempt.answers, fresh)


def _of_texts(setup: TextSetup, said: dict[str, Any], total: int) -> dict[str, Any]:
    """What the manifest says about texts: how many were cut only if this attempt, on this device, scored them all."""
    return setup.to_json() | ({"truncated": said["truncated"]} if said["records"] == total else {})


def _early_memory(attempt: Attempt) -> tuple[int, int] | None:
    """What `memory_of` says, if memory for batches is surely needed: a worker's resident model may have some."""
    context, reader = attempt.context, attempt.reader
    alone = attempt.texts is not None or reader.total <= context.spec.input.batch_size
    if alone or not context.job.foreground or not devices.separate_memory(attempt.device):
        return None
    return memory_of(attempt.request(), reader, encoded=attempt.decode is not None and attempt.decode.by == "gpu")


def _planned(attempt: Attempt) -> text.TextPlan | None:
    """How texts become batches, which is the same for all attempts and members. Opens the job for other members."""
    context, staging, reader, part = attempt.context, attempt.staging, attempt.reader, attempt.part
    noted = None
    if staging is None:
        assert part is not None
        noted = part.staging.noted()
    elif attempt.texts is not None:
        noted = staging.noted()
    plan = None
    if attempt.texts is not None:
        fields, device = context.spec.output.fields, attempt.device
        plan = text.plan_of(
            reader, attempt.texts, attempt.request(), fields=fields, device=device, store=context.store, noted=noted
        )
    shards = shards_for(reader, context.spec.output.shard_size)
    if plan is not None and part is not None:
        part.claims_windows(spans(shards, (), plan.window))
    if staging is not None and (plan is not None or part is not None):
        note = plan.to_json() if plan is not None else None
        context.patience.through(lambda: staging.note(note))
        if part is not None:
            part.open(shards, staging)
    return plan


def _ready(
    attempt: Attempt, plan: text.TextPlan | None, early: EarlyBuffers
) -> tuple[Scoring, Callable[[], Feed], Counts | None]:
    """Prepare the model, for texts once for each bucket. The second value makes a feed for another round of a member;
    the last one counts texts.

    Raises Stopped.
    """
    context, staging, reader, part = attempt.context, attempt.staging, attempt.reader, attempt.part
    lanes = _lanes(attempt, plan)
    tell_weights(context, context.spec.model)
    decodes.tell(context, attempt.decode, attempt.why_not)
    for number, lane in enumerate(lanes):
        tell(context, lane.prepared, f"up to {plan.buckets[number].length} tokens: " if plan is not None else "")
    shards = shards_for(reader, context.spec.output.shard_size)
    tally = Tally.of(staging, shards) if staging is not None else Tally()
    counted = [shards[shard] for shard in sorted(tally.shards)]
    bad = _bad_records(attempt, staging, counted)
    again: Callable[[], Feed]
    counts = None
    if plan is not None:
        again, stages, counts = _text_feed(attempt, plan, lanes, shards, bad)
    else:
        early.give(lanes[0].prepared.loaded)
        again, stages = _record_feed(attempt, lanes[0].prepared.loaded, shards, bad)
    ragged = frozenset[str]()
    if plan is not None:
        ragged = per_token(lanes[0].prepared.loaded, plan.setup, context.spec.output.fields)
    ends = Ends(per_token=ragged, answers=attempt.answers)
    scoring = Scoring(
        context,
        part.staging if part is not None else attempt.sole,
        again(),
        lanes,
        shards=shards,
        tally=tally,
        stages=stages,
        ends=ends,
    )
    return scoring, again, counts


def _lanes(attempt: Attempt, plan: text.TextPlan | None) -> list[Lane]:
    """The model, ready; for texts once for each bucket, in their order. Raises Stopped."""
    context = attempt.context
    requests = plan.requests if plan is not None else (attempt.request(),)
    siblings = Siblings() if plan is not None else None
    lanes: dict[int, Lane] = {}
    with keeping_compilers(), context.residents.several() as tell_of_residents:

        def report(**said: Any) -> None:
            if said.get("phase") == "build":  # it takes long, and what others do not know to be in use may be removed
                tell_of_residents()
            context.report(**said)

        for number in plan.in_turn if plan is not None else [0]:
            prepared = prepare(
                requests[number],
                device=attempt.device,
                store=context.store,
                residents=context.residents,
                report=report,
                waiting=waiting(context),
                builders=context.builders,
                siblings=siblings,
            )
            if siblings is not None and prepared.loaded.siblings is not None:  # of an earlier job, if any are left
                siblings = prepared.loaded.siblings
            lanes[number] = Lane(prepared=prepared, share=plan.shares[number] if plan is not None else 1.0)
    return [lanes[number] for number in range(len(requests))]


def _text_feed(
    attempt: Attempt, plan: text.TextPlan, lanes: list[Lane], shards: list[tuple[int, int]], bad: BadRecords
) -> tuple[Callable[[], Feed], Stages, Counts]:
    part = attempt.part
    windows = spans(shards, attempt.sole.done, plan.window) if part is None else None
    turns = part.spans if part is not None else lambda: [(windows or (), 0)]
    device = attempt.device
    return text.feed_of(attempt.context, attempt.reader, plan, lanes, turns, windows=windows, bad=bad, device=device)


def _record_feed(
    attempt: Attempt, loaded: Loaded, shards: list[tuple[int, int]], bad: BadRecords
) -> tuple[Callable[[], RecordFeed], Stages]:
    context, reader, part = attempt.context, attempt.reader, attempt.part
    limits = _limits(context, loaded)
    bounds = cut(shards, frozenset(attempt.sole.done), loaded.request.batch_size) if part is None else []
    decode = decodes.on_device(attempt.decode, reader, loaded, context.residents)
    alone = part is None and len(bounds) <= 1
    stages = Stages(context, alone=alone, in_flight=loaded.in_flight, decodes=decode is not None)

    def turns() -> Iterable[Turn]:
        if part is None:
            return [bounds]
        size = loaded.request.batch_size
        claimed = (cut_claims(claims, size, beyond=beyond) for claims, beyond in part.turns())
        return claimed if reader.in_blocks else [in_a_row(claimed)]

    def feed() -> RecordFeed:
        last = bounds[-1].shard if bounds else -1
        return RecordFeed(
            reader,
            loaded,
            turns(),
            stages,
            last=last,
            bad=bad,
            limits=limits,
            decode=decode,
            fetching=context.fetching,
        )

    return feed, stages


def _bad_records(attempt: Attempt, staging: AnyStaging | None, counted: Sequence[tuple[int, int]] = ()) -> BadRecords:
    """The count of bad records, which begins with those of which `staging` knows: they lie in `counted`."""
    before, context, reader = staging.bad if staging is not None else [], attempt.context, attempt.reader
    total, request_of = reader.total, None
    if attempt.answers is not None:
        before = [attempt.answers.first_record(refused) for refused in before]
        total, request_of = attempt.answers.total, attempt.answers.number
    return BadRecords(
        context.spec.run,
        total,
        place=reader.place,
        report=context.report,
        before=before,
        counted=counted,
        request_of=request_of,
    )


def _published(
    attempt: Attempt, staging: AnyStaging, tally: Tally, summary: dict[str, Any], how_made: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The folder, and which files are left for the next job. Raises OutputExists, FencedOut."""
    context, reader, work = attempt.context, attempt.reader, attempt.work
    context.report(phase="publish", done=tally.counted(attempt.answers))
    how_made |= {"schedule": summary["key"], "runs": summary["runs"]}
    if attempt.decode is not None:
        how_made["decode"] = attempt.decode.to_json()
    left = {} if work is None else only_new.left_over(work, reader, staging.bad)
    if work is not None:
        how_made["only_new"] = work.summary(left)
    shards = len(shards_for(reader, context.spec.output.shard_size))
    outputs = context.patience.through(lambda: staging.publish(how_made, shards=shards))
    tell_published(context, staging)
    return outputs, left


def already_published(context: JobContext, staging: AnyStaging) -> Outcome:
    """The output is there: an earlier attempt died between publishing it and saying so, or it is being resumed."""
    assert staging.finished is not None
    context.event("published", f"{staging.finished['path']} already holds this job's output", {})
    context.report(done=staging.finished["records"] + staging.finished["bad"], bad=staging.finished["bad"])
    outputs = context.patience.through(lambda: staging.publish({}))
    return Outcome(outputs=outputs, publication=staging.publication)


def _limits(context: JobContext, loaded: Loaded) -> Limits:
    """What the model's whole numbers must lie between. Raises OutOfMemory."""
    if not loaded.request.holds_integers:
        return Limits()
    if loaded.limits is None:
        loaded.limits = find_limits(loaded.module, loaded.request.input_shape, loaded.device)
    tell_unchecked(context, loaded.limits)
    return loaded.limits
