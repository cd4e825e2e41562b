"""Decides what a job runs on until its schedule is stored, and moves it to a better one between two batches.

`due` is cheap; it is asked before each batch. If it is true, `better` is called with nothing in flight. `finish` is
called after the last batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.payback import Plan, move_pays
from nimble_jobs.planner import Prepared, Progress, improve
from nimble_jobs.planner.jobs.building import capture_quickly
from nimble_jobs.planner.jobs.first_run import idle_cores
from nimble_jobs.planner.jobs.improve import build_now
from nimble_jobs.planner.jobs.prepared import FirstRun
from nimble_jobs.planner.lookup.siblings import choice_words
from nimble_jobs.planner.search.contest import faster_in_eager
from nimble_jobs.plural import count
from nimble_jobs.spec.units import format_duration
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.deciding import At, decided, demand_of, uses_of, want
from nimble_jobs.workloads.waiting import waiting

_DECIDE_S = 0.3  # seconds of running after which the measured rate counts
_DECIDE_BATCHES = 3
_ASK_S = 5.0  # how often the store is asked whether others have built the schedule


def due(context: JobContext, prepared: Prepared, where: Callable[[], At]) -> bool:
    """Whether `better` has something to do. Cheap: it is asked before each batch, while others are in flight.

    `where` says where the job stands. It is called only if the job may still move.
    """
    if prepared.progress in (None, Progress.MOVED, Progress.STAYS):
        return False
    at = where()
    key, builders, run = prepared.loaded.key, context.builders, prepared.first_run
    if prepared.progress is Progress.BUILDING:
        assert builders is not None
        return not builders.running(key) and _move_pays(run, at)
    if run is None or prepared.progress not in (Progress.EAGER, Progress.QUICK) or at.left <= 0:
        return False
    if _undecided(prepared, run):
        # One bucket is built at a time, since the next one then takes over its choice.
        waits = prepared.loaded.siblings is not None and builders is not None and bool(builders.busy)
        return _measured(run, prepared, at) and not waits
    if at.run_s < run.asked_s + _ASK_S:
        return False
    run.asked_s = at.run_s
    return _move_pays(run, at) and context.store.schedules.ready(key)


def better(context: JobContext, prepared: Prepared, at: At) -> Prepared:
    """What the job continues with: `prepared` itself if nothing is better. Any move is recorded on the job.

    Call it with nothing in flight, because it closes what was captured. Raises OutOfMemory, DeviceFault.
    """
    run, random = prepared.first_run, RandomStates(prepared.loaded.device)
    try:
        if run is not None and _undecided(prepared, run):
            found = _begin(context, prepared, run, at)
        elif prepared.progress in (Progress.BUILDING, Progress.EAGER, Progress.QUICK):
            found = _moved(context, prepared, at)
        else:
            return prepared
    finally:
        random.put_back()  # a model that draws numbers does not notice
    context.report(phase="run", schedule=found.summary())
    return found


def finish(context: JobContext, ended: Sequence[tuple[Prepared, At]]) -> None:
    """Call after the last batch, with all models of the job. Builds that pay only later are left to idle workers; no
    build delays the end of a `run`.

    Models of which the same is to be said share an event.
    """
    run_s = sum(at.run_s for _, at in ended)
    said: dict[str, list[str]] = {}
    for prepared, at in ended:
        text = _finished(context, prepared, at, run_s)
        if text is not None:
            said.setdefault(text, []).append(prepared.loaded.key)
    for text, keys in said.items():
        number = f"{len(keys)} of {count(len(ended), 'bucket')}: " if len(ended) > 1 else ""
        context.event("schedule", number + text, {"key": keys[0], "keys": keys})


def _finished(context: JobContext, prepared: Prepared, at: At, run_s: float) -> str | None:
    """What is to be said of the end of one model's turns, in a job of `run_s` seconds."""
    if prepared.progress is None or prepared.first_run is None:
        return None
    run, loaded = prepared.first_run, prepared.loaded
    _close_move(run, at)
    if prepared.progress is Progress.MOVED or context.builders is None:
        return None
    if loaded.ready and not loaded.instances:  # what was built says that eager is faster
        return None
    if not run.why:
        run.why = f"stayed in eager: the job ended after {format_duration(run_s)}, too early to decide on a build"
    want(context, prepared, run, at)
    demand = demand_of(context, prepared)
    if demand.failed is not None:
        left = f"an earlier build failed: {demand.failed}; to try again, run: nimble-jobs cache build SPEC"
    elif not context.builders.running(loaded.key):
        left = "an idle worker will build the schedule" if not context.job.foreground else _BY_HAND
    elif context.job.foreground:
        context.builders.end(loaded.key)
        left = f"the job ended before its background build did, so the build was stopped; {_BY_HAND}"
    else:
        context.builders.alone(loaded.key, ends_at_once=not uses_of(context, demand))
        left = "the job ended before its background build, which continues"
    return left if run.decision is not None else f"{run.why}; {left}"


_BY_HAND = "an idle worker will build the schedule; to build it now, run: nimble-jobs cache build SPEC"


def _undecided(prepared: Prepared, run: FirstRun) -> bool:
    return prepared.progress in (Progress.EAGER, Progress.QUICK) and run.decision is None and not run.why


def _measured(run: FirstRun, prepared: Prepared, at: At) -> bool:
    """Whether the rate is known. The first batch does not count, since it is slow only once."""
    if run.began is None:
        if at.done > 0:
            run.began = (at.done, at.run_s)
        return False
    done, seconds = at.done - run.began[0], at.run_s - run.began[1]
    return seconds >= _DECIDE_S and done >= _DECIDE_BATCHES * prepared.loaded.request.batch_size


def _move_pays(run: FirstRun | None, at: At) -> bool:
    """Whether enough records are left for a move to pay. A job whose spec asks for the move always moves."""
    if run is None or run.costs is None:
        return True
    now_s = _record_s(run, at)
    gain = run.costs.build_ratio / (run.costs.quick_ratio if run.moves else 1.0)
    return move_pays(at.left, now_s, now_s * min(1.0, gain), run.costs)


def _begin(context: JobContext, prepared: Prepared, run: FirstRun, at: At) -> Prepared:
    """Decide, record the decision, and carry it out."""
    loaded = prepared.loaded
    carried = loaded.altered()
    if carried is not None:  # what it carries would have to be carried over, bit by bit
        run.why = f"stays in eager: the model carries {carried!r} from batch to batch"
        context.event("schedule", run.why, {"key": loaded.key})
        return prepared
    demand = demand_of(context, prepared)
    if demand.failed is not None:  # `finish` says why
        run.why = "stays in eager: no build is expected to succeed"
        return prepared
    chosen = decided(context, prepared, run, at, demand)
    run.decision, run.why = chosen, f"from record {at.record:,}: {chosen.why}"
    data = {"key": loaded.key, "plan": chosen.plan.value, "record": at.record, "later": chosen.later}
    figures = {"cost_s": chosen.cost_s, "saving_s": chosen.saving_s, "waits": at.waits, "idle": at.idle}
    ratio = run.costs.quick_ratio if run.costs is not None else None
    context.event("schedule", run.why, data | figures | {"quick_ratio": ratio})
    want(context, prepared, run, at)
    found = prepared
    if chosen.plan.beside:
        assert context.builders is not None
        threads = max(1, int(idle_cores(loaded.device)))
        context.builders.start(loaded.key, loaded.request, loaded.device, threads=threads)
        found = replace(found, progress=Progress.BUILDING)
    if chosen.plan.quick:
        found = _quickly(context, found, run, at)
    elif chosen.plan is Plan.WAIT:
        context.report(phase="build")
        start = time.perf_counter()
        build_now(prepared, store=context.store, waiting=waiting(context), report=context.report)
        found = replace(found, build_s=found.build_s + time.perf_counter() - start)
        found = _moved(context, found, at)
    return found


def _quickly(context: JobContext, prepared: Prepared, run: FirstRun, at: At) -> Prepared:
    """Move to the quick candidate, or stay in eager and record why."""
    loaded = prepared.loaded
    call_s = _record_s(run, at) * loaded.request.batch_size
    start = time.perf_counter()
    reason = capture_quickly(loaded, call_s * 1e6)
    took_s = time.perf_counter() - start
    prepared = replace(prepared, build_s=prepared.build_s + took_s)
    if reason is not None:
        context.event("schedule", f"stays in eager after {took_s:.1f} s: {reason}", {"key": loaded.key})
        return prepared
    assert loaded.schedule is not None
    now = f"{call_s * 1e3:.4g} ms a batch before, a replay takes {loaded.schedule.replay_us / 1e3:.4g} ms"
    message = f"moved to eager's kernels, captured in {took_s:.1f} s, before record {at.record:,}: {now}"
    context.event("schedule", message, {"key": loaded.key, "record": at.record})
    _open_move(run, at, "quick", took_s)
    return prepared if prepared.progress is Progress.BUILDING else replace(prepared, progress=Progress.QUICK)


def _moved(context: JobContext, prepared: Prepared, at: At) -> Prepared:
    """Move to the stored schedule, if there is one; record the outcome on the job."""
    assert context.builders is not None
    before, run = prepared.loaded.schedule, prepared.first_run
    was = f"{before.replay_us / 1e3:.4g} ms a replay before" if before is not None else "in eager before"
    if before is None and run is not None:
        was = f"{_record_s(run, at) * prepared.loaded.request.batch_size * 1e3:.4g} ms a batch in eager before"
    start = time.perf_counter()
    found = improve(
        prepared, store=context.store, residents=context.residents, builders=context.builders, report=context.report
    )
    after, key = found.loaded.schedule, found.loaded.key
    if found.progress is Progress.MOVED and after is not None:
        gain = f"{was}, {after.replay_us / 1e3:.4g} ms now, measured while it ran"
        gain += choice_words(after) + faster_in_eager(after)
        message = f"moved to {key[:12]} before record {at.record:,}: {gain}"
        context.event("schedule", message, {"key": key, "record": at.record})
        if run is not None:
            _open_move(run, at, "stored", time.perf_counter() - start)
    elif found.loaded.fallback is not None:
        message = f"runs in eager from record {at.record:,}: {found.loaded.fallback}"
        context.event("fallback", message, {"key": key})
    elif found.stays_because is not None:
        message = f"continues as it began, because the better schedule could not be loaded: {found.stays_because}"
        context.event("schedule", message, {"key": key, "record": at.record})
    elif found.progress is Progress.STAYS:
        if context.builders.gave_up(key) and not context.builders.may_try_again(key):
            context.store.wanted.failed(key, "the build in the background produced no schedule", time.time())
        context.event(
            "schedule", "the build in the background produced no better schedule; see the worker's log", {"key": key}
        )
    return found


def _record_s(run: FirstRun, at: At) -> float:
    """Seconds for each record since the last move."""
    done, seconds = run.began or (0, 0.0)
    return (at.run_s - seconds) / max(1, at.done - done)


def _open_move(run: FirstRun, at: At, to: str, took_s: float) -> None:
    _close_move(run, at)
    before = run.moves[-1]["record_s"] if run.moves else _record_s(run, at)
    run.moves.append({"record": at.record, "to": to, "took_s": took_s, "record_s_before": before, "record_s": None})
    run.began = (at.done, at.run_s + took_s)


def _close_move(run: FirstRun, at: At) -> None:
    """Record what a move gained, once that is known."""
    if run.moves and run.moves[-1]["record_s"] is None and run.began is not None and at.done > run.began[0]:
        run.moves[-1]["record_s"] = _record_s(run, at)
