"""Routes made of plain functions, which run in threads because they read the store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nimble_jobs.dashboard.answers import answer, refusal
from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.query import BadQuery, Query

Answer = Callable[[Desk, Query, float], Any]  # the last one is the time, in Unix seconds


def get(path: str, function: Answer) -> Callable[[Desk], Route]:
    """A route that reads."""
    return lambda desk: Route(path, _endpoint(desk, function), methods=["GET"])


def post(path: str, function: Answer) -> Callable[[Desk], Route]:
    """A route that changes something."""
    return lambda desk: Route(path, _endpoint(desk, function), methods=["POST"])


def _endpoint(desk: Desk, function: Answer) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        try:
            query = Query(
                path=request.path_params,
                given=dict(request.query_params),
                body=_body(await request.body()) if request.method == "POST" else {},
            )
            value = await to_thread.run_sync(function, desk, query, time.time(), limiter=desk.limiter)
        except Exception as e:  # noqa: BLE001  # the last resort: every error is answered as JSON
            return refusal(e)
        return value if isinstance(value, Response) else answer(value)

    return respond


def _body(data: bytes) -> Mapping[str, Any]:
    """The JSON object of a change's body. Raises BadQuery."""
    if not data:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadQuery("the body is not a JSON object")
    return value
