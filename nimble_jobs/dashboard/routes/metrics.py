"""GET /metrics: the metrics of `nimble-jobs metrics`, for Prometheus.

It needs the token, as `Authorization: Bearer TOKEN`, or the page's cookie, unless the dashboard runs with
`--open-metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nimble_jobs.dashboard.answers import refusal
from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.metrics import exposition

_LONGEST = 1000  # characters of an Accept header that are looked at


def _metrics(desk: Desk) -> Route:
    async def respond(request: Request) -> Response:
        read = partial(exposition, desk.store, request.headers.get("accept", "")[:_LONGEST], gpus=desk.gpus)
        try:
            text, kind = await to_thread.run_sync(read, limiter=desk.limiter)
        except Exception as e:  # noqa: BLE001  # the last resort: every error is answered as JSON
            return refusal(e)
        return Response(text, headers={"content-type": kind})

    return Route("/metrics", respond, methods=["GET"])


ROUTES: tuple[Callable[[Desk], Route], ...] = (_metrics,)
