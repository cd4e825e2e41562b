"""Commands for an operator of the queue: retry, hold, release."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.filters import span_of
from nimble_jobs.cli.jobs import JobIds
from nimble_jobs.errors import UsageError
from nimble_jobs.job import Job
from nimble_jobs.plural import count, plural
from nimble_jobs.views import figures
from nimble_jobs.views import jobs as job_view

_LISTED = 8

OptionalIds = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ID", help="Job id or its first characters, a job's name, or an array's id.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(retry)
    app.command()(hold)
    app.command()(release)


def retry(
    ctx: typer.Context,
    job_ids: OptionalIds = None,
    failed: Annotated[bool, typer.Option("--failed", help="Retry all jobs that failed or were quarantined.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="With --failed: only jobs since 2h ago, or since a date."),
    ] = None,
    with_dependents: Annotated[
        bool,
        typer.Option("--with-dependents", help="Also retry jobs that were cancelled because they waited for these."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Run jobs again that failed, were cancelled or were quarantined. Attempts are counted from zero again.

    Either all named jobs are queued or none. For an array, only the jobs that can be retried are queued. Earlier
    attempts stay in the history.
    """
    from nimble_jobs import queue

    if bool(job_ids) == failed:
        raise UsageError(
            "job ids and --failed cannot be combined" if failed else "no jobs named; give job ids, or --failed"
        )
    if since is not None and not failed:
        raise UsageError("--since needs --failed")
    now = time.time()
    with options.store(ctx) as store:
        again = queue.retry(
            job_ids or (),
            failed=failed,
            since=None if since is None else _since(since, now),
            with_dependents=with_dependents,
            store=store,
            now=now,
        )
    _say(again.queued, "queued again", json=json, none="no job to retry")
    if again.left:
        stays = "stays" if len(again.left) == 1 else "stay"
        hint = "other awaited jobs are not queued" if with_dependents else "retry them too with --with-dependents"
        waiting = f"{count(len(again.left), 'waiting job')} ({figures.few([j.id for j in again.left])})"
        output.note(f"{waiting} {stays} cancelled; {hint}")


def hold(ctx: typer.Context, job_ids: JobIds, json: options.Json = False) -> None:
    """Keep queued jobs from starting until they are released. Either all are held or none."""
    from nimble_jobs import queue

    _say(queue.hold(job_ids, home=options.home(ctx)), "held", json=json)


def release(ctx: typer.Context, job_ids: JobIds, json: options.Json = False) -> None:
    """Let held jobs run again. Either all are released or none."""
    from nimble_jobs import queue

    _say(queue.release(job_ids, home=options.home(ctx)), "released", json=json)


def _say(jobs: Sequence[Job], done: str, *, json: bool, none: str = "no jobs") -> None:
    if json:
        now = time.time()
        output.emit_json([job_view.job_row(job, now) for job in jobs])
        return
    for job in jobs[:_LISTED]:
        output.note(f"{job.name} {job.id}: {done}")
    if len(jobs) > _LISTED:
        more = len(jobs) - _LISTED
        output.note(f"and {more:,} more {plural(more, 'job')}: {done}")
    if not jobs:
        output.note(none)


def _since(text: str, now: float) -> float:
    try:
        return span_of("since", text, now)[0]
    except UsageError as e:
        raise UsageError(f"--since: {str(e).partition('since: ')[2]}") from e
