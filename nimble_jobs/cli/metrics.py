"""The command metrics: prints Prometheus metrics, or writes them to a file again and again."""

from __future__ import annotations

from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.errors import HomeReplaced, NimbleError, UsageError

if TYPE_CHECKING:
    from nimble_jobs.metrics import Gpus
    from nimble_jobs.store import Store

_LEAST_S = 1.0
_OPTION = "--textfile"


def register(app: typer.Typer) -> None:
    app.command()(metrics)


def metrics(
    ctx: typer.Context,
    textfile: Annotated[
        Path | None,
        typer.Option(_OPTION, metavar="PATH", help="Write to this .prom file, for node_exporter's textfile collector."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="TIME", help="With --textfile: rewrite the file this often, such as 15s, until Ctrl-C."
        ),
    ] = None,
    openmetrics: Annotated[
        bool, typer.Option("--openmetrics", help="Print OpenMetrics instead of Prometheus' text format.")
    ] = False,
    grafana: Annotated[
        bool, typer.Option("--grafana", help="Print a Grafana dashboard as JSON instead of metrics.")
    ] = False,
) -> None:
    """Print metrics for Prometheus.

    They cover jobs, schedules, timers, notifications, workers and GPUs. They are read from the state folder, so
    neither a worker nor a server needs to run.
    """
    if grafana:
        if textfile is not None or every is not None or openmetrics:
            raise UsageError("--grafana prints the dashboard alone; leave out the other options")
        _gpus()
        from nimble_jobs.metrics.grafana import dashboard

        output.emit(dashboard().removesuffix("\n"))
        return
    every_s = options.duration(every, "--every")
    if every_s is not None and textfile is None:
        raise UsageError("--every needs --textfile PATH, the file that is written again and again")
    if every_s is not None and every_s < _LEAST_S:
        raise UsageError(f"--every: found {every}; expected at least {_LEAST_S:g}s")
    if openmetrics and textfile is not None:
        raise UsageError("--openmetrics: the textfile collector reads Prometheus' text format only; leave it out")
    gpus = _gpus()
    with options.store(ctx) as store:
        if textfile is None:
            from nimble_jobs.metrics.exposition import OPEN_METRICS, exposition

            text, _ = exposition(store, OPEN_METRICS if openmetrics else "", gpus=gpus)
            output.emit(text.decode().removesuffix("\n"))
        elif every_s is None:
            _write(store, gpus, textfile)
        else:
            _repeat(store, gpus, textfile, every_s)


def _gpus() -> Gpus:
    """A reader of GPUs. Raises UsageError if the extra is not installed."""
    try:
        from nimble_jobs.metrics import Gpus
    except ModuleNotFoundError as e:
        raise UsageError(
            f"metrics: {e.name} is not installed; install it with: pip install 'nimble-jobs[metrics]'"
        ) from e
    return Gpus()


def _write(store: Store, gpus: Gpus, path: Path) -> None:
    from nimble_jobs.metrics.exposition import exposition
    from nimble_jobs.metrics.textfile import check_textfile, write_textfile

    check_textfile(path, _OPTION)
    write_textfile(path, exposition(store, gpus=gpus)[0], _OPTION)


def _repeat(store: Store, gpus: Gpus, path: Path, every_s: float) -> None:
    """Write until a signal. Once a first writing went well, errors are noted, and the file stays as it was."""
    from nimble_jobs.worker.signals import StopSignals

    with StopSignals() as signals:
        _write(store, gpus, path)
        output.note(f"writing {path} every {every_s:g} s; stop with SIGTERM or Ctrl-C")
        said: str | None = None
        while not signals.count:
            wait([signals.fileno()], timeout=every_s)
            signals.clear()
            if signals.count:
                return
            try:
                _write(store, gpus, path)
                said = None
            except HomeReplaced:
                raise
            except NimbleError as error:
                if str(error) != said:
                    said = str(error)
                    output.note(f"could not write; trying again in {every_s:g} s: {said}")
