"""Commands about workers: worker start, ls, stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output, render, waits
from nimble_jobs.cli.filters import Kind
from nimble_jobs.cli.listing import Column, Row, Selection, print_rows
from nimble_jobs.errors import NotFound, UsageError

if TYPE_CHECKING:
    from nimble_jobs.store.records import WorkerInfo

app = typer.Typer(
    name="worker", help="Processes that run jobs and keep captured graphs on the device.", no_args_is_help=True
)

KEYS = {
    "id": Kind.TEXT,
    "pid": Kind.NUMBER,
    "device": Kind.TEXT,
    "status": Kind.TEXT,
    "job": Kind.TEXT,
    "health": Kind.TEXT,
    "seen_s": Kind.SECONDS,
    "progress_s": Kind.SECONDS,
    "started_at": Kind.TIME,
    "up_s": Kind.SECONDS,
    "residents": Kind.TEXTS,
}

COLUMNS = (
    Column(header="ID", cell=lambda row: row["id"], flexible=True),
    Column(header="PID", cell=lambda row: str(row["pid"] or "-"), justify="right"),
    Column(header="DEVICE", cell=lambda row: row["device"] or "-"),
    Column(header="STATUS", cell=lambda row: row["health"] or row["status"] or "-"),
    Column(header="JOB", cell=lambda row: row["job"] or "-"),
    Column(
        header="PROGRESS",
        cell=lambda row: "-" if row["progress_s"] is None else f"{render.duration(row['progress_s'])} ago",
        justify="right",
    ),
    Column(header="RESIDENT", cell=lambda row: str(len(row["residents"])), justify="right"),
    Column(header="UP", cell=lambda row: render.duration(row["up_s"]), justify="right"),
)


@app.command()
def start(
    ctx: typer.Context,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return at once; the worker goes on alone.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N; default: that of config.yaml, or auto.")
    ] = None,
    max_idle: Annotated[
        str | None,
        typer.Option("--max-idle", metavar="TIME", help="Leave after this time without work, 10m for instance."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Budget for resident models and graphs, 20GB for instance."),
    ] = None,
) -> None:
    """Start a worker, here or detached. SIGTERM and Ctrl-C finish the shard at hand and give the job back."""
    max_idle_s = options.duration(max_idle, "--max-idle")
    settings = options.configured(ctx, device=device, gpu_memory=gpu_memory)
    home = options.home(ctx)
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


@app.command()
def ls(
    ctx: typer.Context,
    filters: options.Filters = None,
    sort: options.Sort = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List the workers that run now."""
    rows = Selection(filters=filters or (), sort=sort, limit=limit).apply(_rows(ctx), KEYS)
    for row in rows:
        if row["health_words"]:
            output.note(row["health_words"])
    if (problem := _config_problem(ctx)) is not None:
        output.note(f"config.yaml is not valid; workers go on with the values from before:\n{problem}")
    empty = f"no worker is running; {waits.START}"
    print_rows(rows, COLUMNS, id_key="id", json=json, quiet=quiet, empty=empty)


@app.command()
def stop(
    ctx: typer.Context,
    worker_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Worker id or its beginning; all where none is named.", show_default=False),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long to wait for them to leave.")
    ] = "90s",
) -> None:
    """Ask workers to finish the shard at hand, give their job back, and leave; wait until they did."""
    from nimble_jobs import client

    timeout_s = options.duration(timeout, "--timeout") or 0.0
    home = options.home(ctx)
    chosen = _chosen(client.live_workers(home=home), worker_ids or ())
    if not chosen:
        output.note("no worker is running")
        return
    for worker in chosen:
        output.note(f"worker {worker.id} (process {worker.pid}): asked to leave")
    client.stop_workers([worker.id for worker in chosen], home=home, timeout_s=timeout_s)
    output.note("gone")


def _chosen(live: list[WorkerInfo], wanted: Sequence[str]) -> list[WorkerInfo]:
    if not wanted:
        return live
    chosen: list[WorkerInfo] = []
    for prefix in wanted:
        found = [worker for worker in live if worker.id.startswith(prefix)]
        if not found:
            raise NotFound(f"no running worker {prefix!r}; see them with: nimble-jobs worker ls")
        if len(found) > 1:
            raise UsageError(f"{prefix!r} could be {', '.join(worker.id for worker in found)}; type more of it")
        chosen += found
    return chosen


def _rows(ctx: typer.Context) -> list[Row]:
    from nimble_jobs import client
    from nimble_jobs.store.health import health_of

    now = time.time()
    with options.store(ctx) as store:
        live = client.live_workers(store=store)
        residents = store.schedules.residents([worker.id for worker in live])
        running = {job.worker: job.id for job in store.jobs.running()}
        health = {worker.id: health_of(worker, store.home) for worker in live}
    return [
        {
            "id": worker.id,
            "pid": worker.pid or None,
            "device": worker.device,
            "status": worker.status,
            "job": running.get(worker.id),
            "health": health[worker.id].state,
            "health_words": health[worker.id].words or None,
            "seen_s": _rounded(health[worker.id].seen_s),
            "progress_s": _rounded(health[worker.id].progress_s),
            "started_at": output.iso(worker.started_at),
            "up_s": round(now - worker.started_at, 3),
            "residents": sorted(key for key, holders in residents.items() if worker.id in holders),
        }
        for worker in live
    ]


def _config_problem(ctx: typer.Context) -> str | None:
    from nimble_jobs.settings import Watched

    return Watched(options.home(ctx)).problem


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
