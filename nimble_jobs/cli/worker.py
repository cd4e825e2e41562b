"""Commands about workers: worker start, ls, stop, and those of `worker_orders`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output, worker_orders, worker_service
from nimble_jobs.cli.chosen import chosen
from nimble_jobs.cli.filters import Kind
from nimble_jobs.cli.listing import Column, Selection, print_rows
from nimble_jobs.views import figures, waits
from nimble_jobs.views.figures import Row
from nimble_jobs.views.workers import worker_rows

if TYPE_CHECKING:
    pass

app = typer.Typer(name="worker", help="Start, list and control the processes that run jobs.", no_args_is_help=True)

KEYS = {
    "id": Kind.TEXT,
    "pid": Kind.NUMBER,
    "device": Kind.TEXT,
    "status": Kind.TEXT,
    "job": Kind.TEXT,
    "phase": Kind.TEXT,
    "health": Kind.TEXT,
    "seen_s": Kind.SECONDS,
    "progress_s": Kind.SECONDS,
    "stall_s": Kind.SECONDS,
    "started_at": Kind.TIME,
    "up_s": Kind.SECONDS,
    "residents": Kind.TEXTS,
}

_STILL_S = 60.0  # from here on, `worker ls` says in minutes how long there was no progress

COLUMNS = (
    Column(header="ID", cell=lambda row: row["id"], flexible=True),
    Column(header="PID", cell=lambda row: str(row["pid"] or "-"), justify="right"),
    Column(header="DEVICE", cell=lambda row: row["device"] or "-"),
    Column(header="STATUS", cell=lambda row: row["health"] or row["status"] or "-"),
    Column(header="JOB", cell=lambda row: row["job"] or "-"),
    Column(header="PHASE", cell=lambda row: row["phase"] or "-", from_width=100),
    Column(header="PROGRESS", cell=lambda row: _progress(row)),
    Column(header="RESIDENT", cell=lambda row: str(len(row["residents"])), justify="right", from_width=100),
    Column(header="UP", cell=lambda row: figures.duration(row["up_s"]), justify="right"),
)


@app.command()
def start(
    ctx: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run the worker in the background and return.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N; default: device in config.yaml, or auto.")
    ] = None,
    max_idle: Annotated[
        str | None,
        typer.Option("--max-idle", metavar="TIME", help="Stop after this time without work, such as 10m."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory", metavar="SIZE", help="Device memory for resident models and graphs, such as 20GB."
        ),
    ] = None,
) -> None:
    """Start a worker, in this terminal or detached.

    On SIGTERM or Ctrl-C it finishes its shard or training step, puts the job back into the queue, and stops.
    """
    max_idle_s = options.duration(max_idle, "--max-idle")
    settings = options.configured(ctx, device=device, gpu_memory=gpu_memory)
    home = options.home(ctx)
    with options.store(ctx) as store:
        if store.orders.of_all().wanted == "pause":
            output.note("all workers of this state folder are paused; resume with: nimble-jobs worker resume")
    if detach:
        from nimble_jobs import client

        worker = client.start_worker(
            home=home, device=settings.device, max_idle_s=max_idle_s, gpu_memory_bytes=settings.gpu_memory
        )
        output.emit(worker.id)
        output.note(f"process {worker.pid} on {worker.device}; stop it with: nimble-jobs worker stop")
        return
    from nimble_jobs.worker import serve

    raise typer.Exit(
        serve.run(home, device=settings.device, max_idle_s=max_idle_s, gpu_memory_bytes=settings.gpu_memory)
    )


worker_orders.register(app)
app.add_typer(worker_service.app)


@app.command()
def ls(
    ctx: typer.Context,
    filters: options.Filters = None,
    sort: options.Sort = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List the running workers."""
    with options.store(ctx) as store:
        rows = Selection(filters=filters or (), sort=sort, limit=limit).apply(worker_rows(store), KEYS)
        problem = store.settings.problem
    for row in rows:
        if row["health_words"]:
            output.note(row["health_words"])
        for duty, reason in row["failing"].items():
            output.note(f"worker {row['id']}: {duty} failed and will be retried: {reason}")
    if problem is not None:
        output.note(f"config.yaml is not valid; workers keep the previous values:\n{problem}")
    empty = f"no worker is running; {waits.START}"
    print_rows(rows, COLUMNS, id_key="id", json=json, quiet=quiet, empty=empty)


@app.command()
def stop(
    ctx: typer.Context,
    worker_ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID", help="Worker id or its first characters; default: all workers.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long to wait for the workers to stop.")
    ] = "90s",
) -> None:
    """Ask workers to finish their shard or training step, put their job back into the queue, and stop.

    The command waits until they have stopped.
    """
    from nimble_jobs import client

    timeout_s = options.duration(timeout, "--timeout") or 0.0
    home = options.home(ctx)
    leaving = chosen(client.live_workers(home=home), worker_ids or ())
    if not leaving:
        output.note("no worker is running")
        return
    for worker in leaving:
        output.note(f"worker {worker.id} (process {worker.pid}): asked to stop")
    client.stop_workers([worker.id for worker in leaving], home=home, timeout_s=timeout_s)
    output.note("stopped")


def _progress(row: Row) -> str:
    """The time of the job's last progress, or a warning if there was none for long."""
    seconds = row["progress_s"]
    if seconds is None:
        return "-"
    if seconds < _STILL_S:
        return f"{figures.duration(seconds)} ago"
    return f"no progress for {figures.duration(seconds - seconds % _STILL_S).removesuffix(' 00s')}"
