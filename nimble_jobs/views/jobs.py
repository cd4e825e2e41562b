"""How jobs look to people and in JSON: rows, states, progress, and how they ended."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nimble_jobs.job import Attempt, BadKind, Event, Job, JobState
from nimble_jobs.plural import count
from nimble_jobs.views import figures, file_counts
from nimble_jobs.views.figures import Row

_LISTED = 8  # events of one kind in a row; JSON has all


def job_row(job: Job, now: float, waits: str | None = None) -> Row:
    """The JSON row of a job in `ls`; `waits` says why it does not run yet."""
    elapsed = None if job.started_at is None else max(0.0, (job.finished_at or now) - job.started_at)
    return {
        "id": job.id,
        "name": job.name,
        "kind": job.kind,
        "state": job.state.value,
        "attempt": job.attempt,
        "created_at": figures.iso(job.created_at),
        "started_at": figures.iso(job.started_at),
        "finished_at": figures.iso(job.finished_at),
        "elapsed_s": None if elapsed is None else round(elapsed, 3),
        "records_done": job.records_done,
        "records_total": job.records_total,
        "records_bad": job.records_bad,
        "records_per_s": records_per_s(job, now),
        "phase": job.phase,
        "hit": job.schedule.get("hit"),
        "runs": job.schedule.get("runs"),
        "device": job.device,
        "priority": job.priority,
        "urgency": job.urgency,
        "held": job.held,
        "group": job.group,
        "array": job.array,
        "array_index": job.array_index,
        "worker": job.worker,
        "error": job.error,
        "waits": waits,
    }


def unit(job: Job) -> str:
    """What the job counts as its records: requests, each perhaps with several texts, if it answers a batch file.

    Only for a job with its spec, which listings leave out.
    """
    answers = job.kind == "score" and job.spec.get("output", {}).get("format") == "openai-batch"
    return "request" if answers else "record"


def counts(jobs: Sequence[Job]) -> dict[str, int]:
    """How many jobs are in each state."""
    numbers = Counter(job.state for job in jobs)
    return {state.value: numbers[state] for state in JobState}


def records_per_s(job: Job, now: float) -> float | None:
    """The measured rate, else the mean rate since the attempt began."""
    measured = job.timings.get("records_per_s")
    if measured:
        return round(float(measured), 3)
    if job.state is not JobState.RUNNING or job.started_at is None or not job.records_done:
        return None
    return round(job.records_done / max(now - job.started_at, 1e-3), 3)


def job_json(
    job: Job, attempts: Sequence[Attempt], events: Sequence[Event], now: float, waits: str | None = None
) -> Row:
    """The JSON of `show`."""
    return job_row(job, now, waits) | {
        "unit": unit(job),
        "max_attempts": job.max_attempts,
        "key": job.key,
        "after": list(job.after),
        "after_when": {parent: when.value for parent, when in job.after_when.items()},
        "skipped_by": job.skipped_by,
        "queued_at": figures.iso(job.queued_at),
        "attempts_before": job.attempts_before,
        "not_before": figures.iso(job.not_before) if job.not_before else None,
        "timeout_s": job.timeout_s,
        "cancel_requested": job.cancel_requested,
        "foreground": job.foreground,
        "spec": job.spec,
        "schedule": job.schedule,
        "timings": job.timings,
        "outputs": job.outputs,
        "only_new": file_counts.only_new(job, events),
        "attempts": [
            {
                "number": attempt.number,
                "worker": attempt.worker,
                "started_at": figures.iso(attempt.started_at),
                "finished_at": figures.iso(attempt.finished_at),
                "outcome": attempt.outcome,
                "error": attempt.error,
                "bad_kinds": [_kind_json(kind) for kind in attempt.bad_kinds],
            }
            for attempt in attempts
        ],
        "bad_kinds": [_kind_json(kind) for kind in bad_kinds(job, attempts)],
        "events": [event_json(event) for event in events],
    }


def tries(job: Job, attempts: Sequence[Attempt]) -> str:
    """The attempt's number, and how many attempts are used since the job was queued or retried.

    Those that went back to the queue have a number and are not counted.
    """
    back = sum(each.outcome == "requeued" and each.number > job.attempts_before for each in attempts)
    used = f"{job.attempt - job.attempts_before - back} of {job.max_attempts}"
    used += " since the last retry" if job.attempts_before else ""
    used += f" without {back} that went back to the queue" if back else ""
    return f"{job.attempt}; {used}" if job.attempts_before or back else used


def bad_kinds(job: Job, attempts: Sequence[Attempt]) -> Sequence[BadKind]:
    """The job's bad records by what was wrong with them, as its newest attempt that met some reported them."""
    return next((each.bad_kinds for each in reversed(attempts) if each.bad_kinds and job.records_bad), ())


def _kind_json(kind: BadKind) -> dict[str, Any]:
    return {"reason": kind.reason, "count": kind.count, "first": kind.first}


def progress_row(job: Job, now: float) -> Row:
    """What changes while a job runs: counts, rate, remaining time, and the phase or a training's figures in words."""
    rate = records_per_s(job, now)
    left = None if job.records_total is None else max(0, job.records_total - job.records_done)
    remaining_s = job.timings.get("remaining_s")
    if remaining_s is None and rate and left is not None:
        remaining_s = left / rate
    runs = job.state is JobState.RUNNING
    busy_with = phase(job) if job.phase not in (None, "run") else training(job.timings) or schedule_state(job)
    return {
        "id": job.id,
        "state": job.state.value,
        "phase": job.phase,
        "records_done": job.records_done,
        "records_total": job.records_total,
        "records_bad": job.records_bad,
        "records_per_s": rate,
        "steps": job.timings.get("steps"),
        "step": job.timings.get("step"),
        "steps_per_s": job.timings.get("steps_per_s"),
        "remaining_s": round(remaining_s, 1) if runs and remaining_s is not None else None,
        "doing": busy_with or None if runs else None,
    }


def event_json(event: Event) -> dict[str, Any]:
    return {
        "at": figures.iso(event.at),
        "attempt": event.attempt,
        "kind": event.kind,
        "message": event.message,
        "data": event.data,
    }


def progress(row: dict[str, Any]) -> str:
    """640/1437 44%; the total is unknown until the input is opened."""
    done, total = row["records_done"], row["records_total"]
    if total == 0:
        return "empty"
    if total is None:
        return str(done) if done else "-"
    return f"{done}/{total} {100 * done // total:>3}%"


def state_text(row: Row) -> str:
    """The state in a job's row, with the phase while the job prepares its run."""
    if row["held"] and row["state"] == JobState.QUEUED:
        return "queued held"
    if row["state"] == JobState.RUNNING and row["phase"] not in (None, "run"):
        return f"running {row['phase']}"
    return str(row["state"])


NOT_BUILT = "not built"  # how `schedule_state` begins for jobs whose schedule did not pay, or not yet
_BEGUN = {  # the schedule's progress of a job that began in eager
    "eager": f"{NOT_BUILT}, eager PyTorch instead",
    "quick": f"{NOT_BUILT}, eager's kernels captured",
    "building": "being built in the background",
    "moved": "built in the background",
}


def first_run(job: Job) -> list[tuple[str, str]]:
    """The decision of a job that began in eager, its reason, and the gain of each move."""
    decided = job.schedule.get("first_run") or {}
    lines = [("first run", str(decided["why"]))] if decided.get("why") else []
    for move in decided.get("moves", ()):
        to = "eager's kernels, captured" if move["to"] == "quick" else "the stored schedule"
        took = f"in {figures.duration(move['took_s'])}" if move.get("took_s") is not None else ""
        before, after = move.get("record_s_before"), move.get("record_s")
        gain = f": {figures.rate(1 / before)} before, {figures.rate(1 / after)} after" if before and after else ""
        lines.append(("moved", f"before record {move['record']:,} to {to} {took}{gain}"))
    return lines


def schedule_state(job: Job) -> str:
    """How the job got its schedule, in words; empty before it is known."""
    if fallback(job):
        buckets = job.schedule.get("buckets", ())
        in_eager = sum(bucket["runs"] == "eager" for bucket in buckets)
        return "eager" if in_eager == len(buckets) else f"eager in {in_eager} of {count(len(buckets), 'bucket')}"
    begun = _BEGUN.get(str(job.schedule.get("progress")))
    if begun is not None and job.schedule.get("first_run"):
        return begun
    hit = job.schedule.get("hit")
    return {"miss": "built", "stored": "stored hit", "resident": "resident hit"}.get(str(hit), "")


def phase(job: Job) -> str | None:
    """The phase of a running job, with the current candidate of a build: build: eager kernels, 2 streams."""
    trying = job.schedule.get("trying")
    return f"build: {trying}" if job.phase == "build" and trying else job.phase


def fallback(job: Job) -> str | None:
    """Why the job ran in eager, if it did."""
    reason = job.schedule.get("fallback")
    return str(reason) if reason else None


def weights(events: Sequence[Event]) -> list[tuple[str, str]]:
    """The origin of weights that come from no file, as the job reported it; nothing for other jobs."""
    messages = [event.message for event in events if event.kind == "weights"]
    return [("weights", text) for text in messages[-1:]]


def summary(job: Job) -> str:
    """One line on how a job ended."""
    head = f"{job.name} {job.id} {job.state.value}"
    if job.state is not JobState.SUCCEEDED:
        return f"{head}: {job.error}" if job.error else head
    elapsed = None if job.started_at is None or job.finished_at is None else job.finished_at - job.started_at
    if job.outputs.get("empty"):
        return f"{head}: empty, no new files"
    parts = [f"{count(job.records_done, unit(job))} in {figures.duration(elapsed)}"]
    if job.records_bad:
        parts.append(f"{job.records_bad:,} bad")
    if not_finite := job.outputs.get("not_finite"):
        parts.append(f"NaN or infinity in {', '.join(not_finite)}")
    measured = job.timings.get("records_per_s")
    if measured:
        parts.append(figures.rate(measured))
    if job.schedule.get("eager_is_faster", job.schedule.get("runs") == "eager") and not fallback(job):
        parts.append("eager is faster here")
    elif schedule_state(job):
        parts.append(f"schedule: {schedule_state(job)}")
    path = job.outputs.get("path")
    return f"{head}: {', '.join(parts)}" + (f"; {figures.short_path(path)}" if path else "")


def training(timings: dict[str, Any]) -> str:
    """A training's figures: loss 0.0812, accuracy 97.5%. Empty if nothing was measured yet."""
    parts = []
    if "loss" in timings:
        parts.append(f"loss {timings['loss']:.3g}")
    if "accuracy" in timings:
        parts.append(f"accuracy {timings['accuracy']:.1%}")
    return ", ".join(parts)


def steps_rate(timings: dict[str, Any]) -> str:
    """A training's rate: 312 steps/s. Empty if it was not measured yet."""
    rate_per_s = timings.get("steps_per_s")
    return f"{figures.rate(rate_per_s).removesuffix('/s')} steps/s" if rate_per_s else ""


def history(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Time and text of events; for many of one kind in a row, only the first and the last ones."""
    lines: list[tuple[str, str]] = []
    for kind, group in itertools.groupby(events, key=lambda event: event.kind):
        alike = [(str(figures.iso(event.at))[11:19], f"{event.kind}: {event.message}") for event in group]
        if len(alike) > _LISTED + 1:
            left_out = len(alike) - _LISTED
            alike[1 : -_LISTED + 1] = [("...", f"{kind}: {left_out} more; --json has all")]
        lines += alike
    return lines
