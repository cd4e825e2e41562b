"""Commands about jobs that were submitted: show, logs, wait, cancel."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.cli import options, output, progress, render
from nimble_jobs.errors import JobCancelled, JobFailed, NotFinishedInTime
from nimble_jobs.job import Attempt, Job, JobState, When
from nimble_jobs.plural import count, plural
from nimble_jobs.views import figures, file_counts, job_notes, members, stages, waits
from nimble_jobs.views import jobs as job_view
from nimble_jobs.views.figures import Row
from nimble_jobs.views.shown import look

if TYPE_CHECKING:
    from nimble_jobs.store import Store

JobIds = Annotated[
    list[str],
    typer.Argument(
        metavar="ID", help="Job id or its first characters, a job's name, or an array's id.", show_default=False
    ),
]
JobId = Annotated[
    str, typer.Argument(metavar="ID", help="Job id or its first characters, or a job's name.", show_default=False)
]


_LISTED = 100  # most jobs of an array that `show` lists


def register(app: typer.Typer) -> None:
    app.command()(show)
    app.command()(logs)
    app.command()(wait)
    app.command()(cancel)


def show(ctx: typer.Context, job_id: JobId, json: options.Json = False) -> None:
    """Show a job, or an array.

    Prints state, attempts, schedule, timings, bad records by what was wrong with them, outputs and events. For an array
    it prints how many jobs are in each state, and the jobs.
    """
    from nimble_jobs import client

    with options.store(ctx) as store:
        client.recover(store)
        chosen = store.jobs.chosen([job_id])
        if len(chosen) > 1:
            show_array(store, chosen, json=json)
            return
        now = time.time()
        shown = look(store, chosen[0], now)
    if json:
        output.emit_json(shown.json(now))
        return
    job, events = shown.job, shown.events
    row, unit = job_view.job_row(job, now, shown.why), job_view.unit(job)
    parts = [("Job", _facts(job, row, shown.attempts) + job_notes.tick_lines(shown.tick) + job_view.weights(events))]
    if job.schedule:
        parts.append(("Schedule", _schedule(job)))
    if job.timings:
        parts.append(("Timings", figures.flat(stages.without(job.timings))))
        parts.append(("Stages", stages.of_job(job)))
    if shown.members:
        parts.append(("Devices", members.lines(shown.members)))
    if counts := file_counts.only_new(job, events):
        parts.append(("Files", file_counts.lines(counts)))
    if kinds := job_view.bad_kinds(job, shown.attempts):
        parts.append(
            (
                f"Bad {plural(2, unit)}",
                [(f"{kind.count:,}", f"{kind.reason}; first: {kind.first}") for kind in kinds],
            )
        )
    if outputs := {name: value for name, value in job.outputs.items() if name != "only_new"}:
        parts.append(("Outputs", figures.flat(outputs)))
    if settings := job_notes.settings_of(events):
        parts.append(("From the configuration", job_notes.settings_lines(settings)))
    if shown.notices:
        parts.append(("Notifications", job_notes.notice_lines(shown.notices)))
    if len(shown.attempts) > 1:
        parts.append(("Attempts", [(str(attempt.number), _attempt(attempt)) for attempt in shown.attempts]))
    parts.append(("Events", job_view.history(events)))
    render.sections(parts)


def show_array(store: Store, jobs: Sequence[Job], *, json: bool) -> None:
    now = time.time()
    why = waits.reasons(store, jobs, now)
    rows = [job_view.job_row(job, now, why.get(job.id)) for job in jobs]
    if json:
        output.emit_json({"array": jobs[0].array, "counts": job_view.counts(jobs), "jobs": rows})
        return
    states = [(state, f"{number:,}") for state, number in job_view.counts(jobs).items() if number]
    first = [("id", str(jobs[0].array)), ("created", figures.clock(jobs[0].created_at)), ("jobs", f"{len(jobs):,}")]
    lines = [(f"{row['array_index']} {row['id']}", _line(row)) for row in rows[:_LISTED]]
    if len(rows) > _LISTED:
        lines.append(("...", f"{len(rows) - _LISTED:,} more; list all with: nimble-jobs ls {jobs[0].array}"))
    render.sections([("Array", first + states), ("Jobs", lines)])


def _line(row: Row) -> str:
    parts = [row["name"], job_view.state_text(row), job_view.progress(row), row["error"] or row["waits"]]
    return ", ".join(" ".join(str(part).split()) for part in parts if part and part != "-")


def logs(
    ctx: typer.Context,
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
) -> None:
    """Print the log of a job."""
    with options.store(ctx) as store:
        job = store.jobs.get(job_id)
        if follow:
            follow_log(store, job.id)
        elif not _pour(store.home, job.id, 0):
            output.note(f"{job.name} {job.id} is {job.state.value} and has no log yet")


def wait(
    ctx: typer.Context,
    job_ids: JobIds,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Give up after this time, such as 90s, 10m or 2h.")
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Wait until jobs end. Exits 0 if all succeeded, 100 if any failed, 101 after --timeout, 103 if cancelled."""
    timeout_s = options.duration(timeout, "--timeout")
    with options.store(ctx) as store:
        ids = [job.id for job in store.jobs.chosen(job_ids)]
        jobs = progress.watch(store, ids, timeout_s=timeout_s, quiet=quiet)
    if json:
        now = time.time()
        output.emit_json([job_view.job_row(job, now) for job in jobs])
    conclude(jobs, quiet=quiet)


def cancel(
    ctx: typer.Context,
    job_ids: JobIds,
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without finishing the running batch.")] = False,
    json: options.Json = False,
) -> None:
    """Cancel jobs. A queued job ends at once, a running one after its current batch."""
    from nimble_jobs import client

    jobs = client.cancel(job_ids, home=options.home(ctx), now=now)
    at = time.time()
    if json:
        output.emit_json([job_view.job_row(job, at) for job in jobs])
        return
    for job in jobs:
        asked = job.state is JobState.RUNNING
        output.note(f"{job.name} {job.id}: {'asked to stop' if asked else job.state.value}")


def conclude(jobs: Sequence[Job], *, quiet: bool = False) -> None:
    """Print how jobs ended. Raises JobFailed or JobCancelled, with the reasons as message, if any did not succeed."""
    good = [job for job in jobs if job.state is JobState.SUCCEEDED]
    if not quiet:
        for job in good[:8]:
            output.note(job_view.summary(job))
        if len(good) > 8:
            output.note(f"and {len(good) - 8} more succeeded")
    failed = [job for job in jobs if job.state in (JobState.FAILED, JobState.QUARANTINED)]
    cancelled = [job for job in jobs if job.state is JobState.CANCELLED]
    if failed:
        raise JobFailed("\n".join(job_view.summary(job) for job in failed + cancelled))
    if cancelled:
        raise JobCancelled("\n".join(job_view.summary(job) for job in cancelled))


def follow_log(
    store: Store,
    job_id: str,
    *,
    stream: Any = None,
    timeout_s: float | None = None,
    attend: Callable[[Job], None] | None = None,
) -> Job:
    """Copy a job's log as it grows, until the job ends; `attend` is called with the job until then.

    Raises NotFinishedInTime.
    """
    from nimble_jobs import client

    offset, started = 0, time.monotonic()
    while True:
        client.recover(store)
        job = store.jobs.get(job_id)
        offset = _pour(store.home, job_id, offset, stream)
        if job.state.final:
            return job
        if attend:
            attend(job)
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            raise NotFinishedInTime(f"not finished after {figures.duration(timeout_s)}: {job.name} {job.id}")
        time.sleep(0.2)


def _pour(home: Path, job_id: str, offset: int, stream: Any = None) -> int:
    """Copy the log from `offset` on to `stream`; return the offset of its end."""
    from nimble_jobs.worker.logs import job_log_path

    stream = stream or sys.stdout
    try:
        with job_log_path(home, job_id).open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return offset
    stream.write(data.decode(errors="replace"))
    stream.flush()
    return offset + len(data)


def _facts(job: Job, row: Row, attempts: Sequence[Attempt]) -> list[tuple[str, str]]:
    asked = ", cancel requested" if job.cancel_requested and not job.state.final else ""
    unit = job_view.unit(job)
    lines = [
        ("id", job.id),
        ("name", job.name),
        ("kind", f"{job.kind} of {job.spec.get('model', {}).get('source', 'a model')}"),
        ("state", job_view.state_text(row) + asked),
        (plural(2, unit), job_view.progress(row) + (f", {job.records_bad:,} bad" if job.records_bad else "")),
        ("rate", figures.rate(row["records_per_s"])),
        ("attempt", job_view.tries(job, attempts)),
        ("priority", f"{job.priority}" + (f", {job.urgency} lent" if job.urgency > job.priority else "")),
        ("created", figures.clock(job.created_at)),
        ("started", figures.clock(job.started_at)),
        ("finished", figures.clock(job.finished_at)),
        ("took" if job.state.final else "so far", figures.duration(row["elapsed_s"])),
        ("device", job.device),
        ("worker", job.worker or "-"),
    ]
    if job.after:
        lines.append(("after", ", ".join(map(_awaited, job.after_when.items()))))
    if job.group:
        lines.append(("group", job.group))
    if job.array:
        lines.append(("array", f"{job.array}, number {job.array_index}"))
    if job.key:
        lines.append(("key", job.key))
    if job.error:
        lines.append(("error", job.error))
    if row["waits"]:
        lines.append(("waits", row["waits"]))
    return lines


def _awaited(wait: tuple[str, When]) -> str:
    job, when = wait
    return job if when is When.SUCCESS else f"{job} ({when.value})"


def _schedule(job: Job) -> list[tuple[str, str]]:
    """State and speed in words, then the fields that these do not cover."""
    state, speed = job_view.schedule_state(job), figures.speedup(job.schedule)
    covered = {
        "hit",
        "runs",
        "eager_is_faster",
        "first_run",
        "spared",
        "buckets",
        *(("replay_us", "eager_us", "device") if speed else ()),
    }
    lines = [(name, text) for name, text in (("state", state), ("speed", speed)) if text]
    rest = {name: value for name, value in job.schedule.items() if name not in covered}
    if rest.get("key"):
        rest["key"] = str(rest["key"])[:16]  # enough for `cache show`
    noun = "text" if job_view.unit(job) == "request" else "record"
    told, buckets = job.schedule.get("fallback"), job.schedule.get("buckets", ())
    each = [(f"{bucket['length']:,} tokens", _bucket(bucket, noun, told)) for bucket in buckets]
    return lines + job_view.first_run(job) + figures.flat(rest) + each


def _bucket(bucket: dict[str, Any], noun: str, told: str | None) -> str:
    """The texts of one length, and what ran them. `told`: a reason to run in eager that the panel names already."""
    ran = "eager PyTorch" if bucket["runs"] == "eager" else f"its schedule, a {bucket['hit']} hit"
    if bucket["runs"] != "eager" and bucket["hit"] == "miss":
        ran = "its schedule, built now"
    why = f": {bucket['fallback']}" if bucket["fallback"] and bucket["fallback"] != told else ""
    if bucket.get("spared"):
        why = f": {bucket['spared']}"
    # Counted in records, and texts of requests. A training takes all of them in every epoch.
    records = f"{count(bucket['records'], noun)}, " if "records" in bucket else ""
    took = f", {figures.micros(bucket['replay_us'])} a step" if bucket.get("replay_us") else ""
    return f"{records}{bucket['batch']:,} in a batch, {ran}{took}, {bucket['key'][:12]}{why}"


def _attempt(attempt: Attempt) -> str:
    took = figures.duration((attempt.finished_at or time.time()) - attempt.started_at)
    return f"{attempt.outcome or 'running'}, {took}, {attempt.worker}" + (f": {attempt.error}" if attempt.error else "")
