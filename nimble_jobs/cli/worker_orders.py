"""Commands that control running workers: worker drain, pause, resume, restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.chosen import chosen
from nimble_jobs.errors import NotFinishedInTime
from nimble_jobs.views import workers
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.store import Store

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Worker id or its first characters; default: all workers.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the commands to `worker`."""
    for command in (drain, pause, resume, restart):
        app.command()(command)


def drain(
    ctx: typer.Context,
    worker_ids: Ids = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until the workers have stopped.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="With --wait: give up after this time, such as 90s or 2h."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Let workers finish their current job, then exit with code 0, so that no service starts them again."""
    from nimble_jobs import client, control
    from nimble_jobs.store import Wanted

    limit_s = options.duration(timeout, "--timeout")
    with options.store(ctx) as store:
        asked = control.ask(store, Wanted.DRAIN, _named(store, worker_ids))
        rows = workers.answers(store, asked, workers.DRAINS)
        _say(rows, json=json, empty="no worker is running")
        if wait:
            left = client.still_there(store, asked, limit_s)
            if left:
                raise NotFinishedInTime(f"still running after {timeout}: {', '.join(left)}")
            if asked:
                output.note("stopped")


def pause(ctx: typer.Context, worker_ids: Ids = None, json: options.Json = False) -> None:
    """Stop workers from taking new jobs until `worker resume`. Running jobs continue.

    Without an ID this applies to all workers, including workers that start later.
    """
    from nimble_jobs import control
    from nimble_jobs.store import Wanted

    with options.store(ctx) as store:
        asked = control.ask(store, Wanted.PAUSE, _named(store, worker_ids))
        rows = workers.answers(store, asked, workers.PAUSES)
    _say(rows, json=json, empty="no worker is running; workers that start later will be paused")


def resume(ctx: typer.Context, worker_ids: Ids = None, json: options.Json = False) -> None:
    """Let workers take jobs again, after `worker pause` or during `worker drain`."""
    from nimble_jobs import control
    from nimble_jobs.store import Wanted

    with options.store(ctx) as store:
        asked = control.ask(store, Wanted.RUN, _named(store, worker_ids))
        rows = workers.answers(store, asked, workers.RESUMES)
    _say(rows, json=json, empty="no worker is running; workers that start later will take jobs")


def restart(ctx: typer.Context, worker_ids: Ids = None, json: options.Json = False) -> None:
    """Replace the process in which each worker runs its jobs, for instance if it hangs, or to free all device memory.

    A running job goes back to the queue at its next safe point, or after limits.grace.
    """
    from nimble_jobs import control

    with options.store(ctx) as store:
        asked = control.restart(store, _named(store, worker_ids))
        rows = workers.answers(store, asked, workers.RESTARTS)
    _say(rows, json=json, empty="no worker is running")


def _named(store: Store, worker_ids: Sequence[str] | None) -> list[str] | None:

    return [worker.id for worker in chosen(store.workers.live("worker"), worker_ids)] if worker_ids else None


def _say(rows: Sequence[Row], *, json: bool, empty: str) -> None:
    if json:
        output.emit_json(list(rows))
        return
    for row in rows:
        output.note(f"worker {row['id']} (process {row['pid']}): {row['words']}")
    if not rows:
        output.note(empty)
