"""The application: the gate around the routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nimble_jobs.dashboard.answers import problem, refusal
from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.files import file_route
from nimble_jobs.dashboard.gate.gate import Gate
from nimble_jobs.dashboard.gate.hosts import Hosts
from nimble_jobs.dashboard.routes import (
    changes,
    job_changes,
    job_files,
    jobs,
    metrics,
    overview,
    schedules,
    timers,
    workers,
)
from nimble_jobs.dashboard.stream.response import Abort

_ROUTES = (
    *overview.ROUTES,
    *job_files.ROUTES,
    *job_changes.ROUTES,
    *jobs.ROUTES,
    *schedules.ROUTES,
    *timers.ROUTES,
    *workers.ROUTES,
    *metrics.ROUTES,
)


def application(desk: Desk, hosts: Hosts, *, abort: Abort, open_metrics: bool = False) -> Gate:
    """The ASGI application. The desk's store stays open until its opener closes it."""

    @asynccontextmanager
    async def polling(_app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(desk.hub.run())
        try:
            yield
        finally:
            desk.hub.closed.set()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            desk.hub.close()
            desk.gpus.close()

    app = Starlette(
        routes=[*(make(desk) for make in _ROUTES), changes.stream(abort)(desk), file_route()],
        exception_handlers={HTTPException: _refused, Exception: _failed},
        lifespan=polling,
    )
    return Gate(app, hosts=hosts, keys=desk.keys, read_only=desk.read_only, open_metrics=open_metrics)


async def _refused(request: Request, error: Exception) -> Response:
    """What the router refuses: a method that the path does not take."""
    assert isinstance(error, HTTPException)
    kind = "method" if error.status_code == 405 else "http"
    return problem(error.status_code, kind, "this method is not allowed here" if kind == "method" else "bad request")


async def _failed(request: Request, error: Exception) -> Response:
    return refusal(error)
