"""GET /api/stream?after=: server-sent events, as `stream.messages` describes them.

The position is the `Last-Event-ID` that a browser sends when it comes back, else `after`, else the newest event.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nimble_jobs.dashboard.answers import problem
from nimble_jobs.dashboard.desk import Desk
from nimble_jobs.dashboard.stream.hub import STREAMS
from nimble_jobs.dashboard.stream.response import Abort, StreamResponse


def stream(abort: Abort) -> Callable[[Desk], Route]:
    """The route; `abort` closes the connection of a client that does not read."""

    def route(desk: Desk) -> Route:
        async def respond(request: Request) -> Response:
            text = request.headers.get("last-event-id") or request.query_params.get("after") or ""
            if text and not (text.isascii() and text.isdigit() and len(text) < 19):
                return problem(422, "query", "after: expected the number of an event")
            if desk.hub.readers >= STREAMS:
                return problem(503, "streams", f"{STREAMS:,} streams are open already; close some pages")
            if request.method == "HEAD":
                return Response(media_type=StreamResponse.media_type)
            return StreamResponse(desk.hub, int(text) if text else None, abort)

        return Route("/api/stream", respond, methods=["GET"])

    return route
