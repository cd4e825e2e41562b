"""The command dashboard: a page in the browser over the state folder."""

from __future__ import annotations

import importlib.util
import webbrowser
from threading import Thread
from typing import Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.errors import UsageError

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_NEEDED = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
}


def register(app: typer.Typer) -> None:
    app.command()(dashboard)


def dashboard(
    ctx: typer.Context,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8765,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show everything, change nothing.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Another host name by which browsers may reach the page, such as a proxy's. Repeatable.",
        ),
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Serve /metrics to anyone, without the token.")
    ] = False,
) -> None:
    """Serve a page that shows queue, jobs, stored schedules, timers and workers, until Ctrl-C.

    Prints the page's address on stdout. The address holds a token. Anyone who has the token can do on the page what you
    can do, so keep it to yourself. The page never submits a job.
    """
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        raise UsageError(f"dashboard: not installed: {names}; install with: pip install 'nimble-jobs[dashboard]'")
    from nimble_jobs.dashboard import serve

    def ready(address: str) -> None:
        output.emit(address)
        output.note("press Ctrl-C to stop")
        if host not in _LOOPBACK:
            output.note(
                f"others can reach {host}, and the token crosses the network unencrypted: see docs/dashboard.md"
            )
        if open_page:
            Thread(target=webbrowser.open, args=(address,), name="browser", daemon=True).start()

    wish = serve.Wish(
        home=options.home(ctx),
        host=host,
        port=port,
        allow_hosts=tuple(allow_host or ()),
        read_only=read_only,
        open_metrics=open_metrics,
    )
    serve.run(wish, ready=ready)
