"""One open stream as a response. It ends with the client, with the server, or if the client does not keep up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from anyio import CancelScope, create_task_group
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nimble_jobs.dashboard.stream.hub import Hub
from nimble_jobs.errors import NimbleError

log = logging.getLogger(__name__)

SEND_S = 20.0  # for the client to take a message when its buffers are full

Abort = Callable[[Scope], None]  # closes a connection without sending what still waits for the client


class StreamResponse(Response):
    """Server-sent events from the hub."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, after: int | None, abort: Abort) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._hub = hub
        self._after = after
        self._abort = abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with self._hub.joined(self._after) as messages, create_task_group() as tasks:
                tasks.start_soon(self._until_over, receive, tasks.cancel_scope)
                await self._pour(messages, send)
                tasks.cancel_scope.cancel()
            async with asyncio.timeout(1.0):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except* TimeoutError:
            self._abort(scope)
        except* NimbleError as group:  # the page comes back, and is told once it asks for anything
            log.warning("a stream ended: %s", "; ".join(map(str, group.exceptions)))

    async def _pour(self, messages: AsyncIterator[bytes], send: Send) -> None:
        async for message in messages:
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": message, "more_body": True})

    async def _until_over(self, receive: Receive, scope: CancelScope) -> None:
        """End the stream once the client is gone or the server stops."""
        closed = asyncio.ensure_future(self._hub.closed.wait())
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((closed, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            gone.cancel()
        scope.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
