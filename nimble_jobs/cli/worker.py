"""Commands about workers: worker start, ls, stop, and those of `worker_orders`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output, worker_orders, worker_ray, worker_script, worker_service
from nimble_jobs.cli.chosen import chosen
from nimble_jobs.cli.filters import Kind
from nimble_jobs.cli.listing import Column, Selection, print_rows
from nimble_jobs.errors import UsageError
from nimble_jobs.views import figures, waits
from nimble_jobs.views.figures import Row
from nimble_jobs.views.workers import worker_rows

if TYPE_CHECKING:
    from nimble_jobs.settings import Settings as Configured

app = typer.Typer(name="worker", help="Start, list and control the processes that run jobs.", no_args_is_help=True)

KEYS = {
    "id": Kind.TEXT,
    "pid": Kind.NUMBER,
    "host": Kind.TEXT,
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
_HOST = Column(header="HOST", cell=lambda row: _short(row["host"]), flexible=True, gives_first=True)
# With hosts, from which width other columns still have room.
_WITH_HOST = {"PID": 100, "PHASE": 120, "RESIDENT": 120}


@app.command()
def start(
    ctx: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run the worker in the background and return.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N; default: device in config.yaml, or auto.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="LIST", help="all, or a list such as cuda:0,cuda:2 or cpu,cpu: a process for each."
        ),
    ] = None,
    max_idle: Annotated[
        str | None,
        typer.Option("--max-idle", metavar="TIME", help="Stop after this time without work, such as 10m."),
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option("--max-time", metavar="TIME", help="Stop this time after the start as on SIGTERM, such as 3h55m."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory", metavar="SIZE", help="Device memory for resident models and graphs, such as 20GB."
        ),
    ] = None,
    ray: Annotated[
        str | None,
        options.unset("--ray", "ADDRESS", "Start workers on a Ray cluster, by HOST:PORT of its head node, or auto."),
    ] = None,
    gpus: Annotated[
        int | None,
        options.unset("--gpus", "N", "With --ray: actors, each with a GPU. Default: all GPUs of the cluster."),
    ] = None,
    node_home: Annotated[
        str | None,
        options.unset(
            "--node-home", "PATH", "With --ray and PostgreSQL: state folder on each node. Default: this one's path."
        ),
    ] = None,
) -> None:
    """Start a worker, in this terminal or detached.

    With `--devices` it has a process for each device, and each has an id and a row in `worker ls`. If one of them dies,
    it is started again, and the others go on.

    With `--ray` Ray starts a worker on each GPU, or with `--devices cpu,cpu` two on CPUs, and starts them again if they
    die. They end with this command.

    On SIGTERM or Ctrl-C it finishes its shard or training step, puts the job back into the queue, and stops.
    """
    from nimble_jobs.worker.devices import devices_of

    if device is not None and devices is not None:
        raise UsageError("--device and --devices: found both; expected one of them")
    if ray is None:
        worker_ray.refuse_alone(gpus=gpus, node_home=node_home)
    max_idle_s = options.duration(max_idle, "--max-idle")
    max_time_s = options.duration(max_time, "--max-time")
    if max_time_s == 0.0:
        raise UsageError("--max-time: found 0; expected a time for the worker to run, such as 3h55m")
    settings = options.configured(ctx, device=device, gpu_memory=gpu_memory)
    home = options.home(ctx)
    with options.store(ctx) as store:
        if store.orders.of_all().wanted == "pause":
            output.note("all workers of this state folder are paused; resume with: nimble-jobs worker resume")
    if ray is not None:
        code = worker_ray.run(
            home,
            address=ray,
            gpus=gpus,
            node_home=node_home,
            device=device,
            devices=devices,
            detach=detach,
            max_idle_s=max_idle_s,
            max_time_s=max_time_s,
            gpu_memory_bytes=settings.gpu_memory,
        )
        raise typer.Exit(code)
    if detach:
        _detached(home, settings, devices and ",".join(devices_of(devices)), max_idle_s, max_time_s)
        return
    from nimble_jobs.worker import serve

    raise typer.Exit(
        serve.run(
            home,
            devices=devices_of(devices) if devices is not None else (settings.device,),
            max_idle_s=max_idle_s,
            max_time_s=max_time_s,
            gpu_memory_bytes=settings.gpu_memory,
        )
    )


def _detached(
    home: Path, settings: Configured, devices: str | None, max_idle_s: float | None, max_time_s: float | None
) -> None:
    from nimble_jobs import client

    started = client.start_worker(
        home=home,
        device=settings.device,
        devices=devices,
        max_idle_s=max_idle_s,
        max_time_s=max_time_s,
        gpu_memory_bytes=settings.gpu_memory,
    )
    for worker in started:
        output.emit(worker.id)
    on = ", ".join(worker.device for worker in started)
    output.note(f"process {started[0].pid} on {on}; stop it with: nimble-jobs worker stop")


worker_orders.register(app)
app.add_typer(worker_service.app)
app.add_typer(worker_script.app)


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
        for job, reason in row["apart"].items():
            output.note(f"worker {row['id']}: does not join job {job}: {reason}")
    if problem is not None:
        output.note(f"config.yaml is not valid; workers keep the previous values:\n{problem}")
    empty = f"no worker is running; {waits.START}"
    print_rows(rows, columns_of(rows), id_key="id", json=json, quiet=quiet, empty=empty)


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

    All devices of a worker stop together; `worker drain ID` takes one of them out. The command waits until they have
    stopped.
    """
    from nimble_jobs import client

    timeout_s = options.duration(timeout, "--timeout") or 0.0
    home = options.home(ctx)
    live = client.live_workers(home=home, here=not worker_ids)
    named = chosen(live, worker_ids or ())
    if not named:
        output.note("no worker is running")
        return
    leaving = client.with_siblings(named, live)
    for worker in leaving:
        too = "" if worker in named else ", because it is a device of the same process"
        output.note(f"worker {worker.id} (process {worker.pid}, {worker.device}): asked to stop{too}")
    client.stop_workers([worker.id for worker in leaving], home=home, timeout_s=timeout_s)
    output.note("stopped")


def columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns of `worker ls`, with the host if several machines may share the database."""
    if not any(row["host"] for row in rows):
        return COLUMNS
    first, *rest = (replace(each, from_width=_WITH_HOST.get(each.header, each.from_width)) for each in COLUMNS)
    return (first, _HOST, *rest)


def _short(host: str | None) -> str:
    """A host's name without its domain; an address as it is."""
    first, _, _ = (host or "-").partition(".")
    return (host or "-") if first.isdecimal() else first


def _progress(row: Row) -> str:
    """The time of the job's last progress, or a warning if there was none for long."""
    seconds = row["progress_s"]
    if seconds is None:
        return "-"
    if seconds < _STILL_S:
        return f"{figures.duration(seconds)} ago"
    return f"no progress for {figures.duration(seconds - seconds % _STILL_S).removesuffix(' 00s')}"
