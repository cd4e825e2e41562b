"""The gate: an ASGI application around the real one, which answers only what every rule lets through."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nimble_jobs.dashboard.gate import admission, forgery, limits, methods, stranger
from nimble_jobs.dashboard.gate.asked import Asked, Refused
from nimble_jobs.dashboard.gate.headers import security_headers
from nimble_jobs.dashboard.gate.hosts import Hosts
from nimble_jobs.dashboard.gate.keys import Keys

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)


class Gate:
    """Refuses requests, adds headers to every response, and logs both without any secret."""

    def __init__(self, app: App, *, hosts: Hosts, keys: Keys, read_only: bool, open_metrics: bool) -> None:
        self._app = app
        self._hosts = hosts
        self._keys = keys
        self._read_only = read_only
        self._open_metrics = open_metrics

    def refusal(self, asked: Asked) -> Refused | None:
        """The first rule's objection. Their order: what is asked, under which name, by whom, and may it be changed."""
        return (
            limits.check(asked)
            or self._hosts.check(asked)
            or methods.check(asked)
            or admission.check(asked, self._keys, open_metrics=self._open_metrics)
            or methods.check_read_only(asked, read_only=self._read_only)
            or (forgery.check(asked, self._hosts, self._keys) if asked.changes else None)
        )

    def signs_in(self, asked: Asked) -> bool:
        """Whether the request brings the token of the printed address, under an allowed name."""
        fit = limits.check(asked) is None and self._hosts.check(asked) is None
        return fit and admission.exchanges(asked, self._keys)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSockets
            raise RuntimeError(f"a connection of type {scope['type']} was opened, though none is offered")
        began = time.perf_counter()
        asked = Asked.of(scope)
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = _with_headers(message, asked.path)
            await send(message)

        try:
            if self.signs_in(asked):
                await _respond(answer, 303, b"", (("location", "/"), ("set-cookie", admission.set_cookie(self._keys))))
            elif refused := self.refusal(asked):
                kind, body = _worded(refused, asked)
                await _respond(answer, refused.status, body, (("content-type", kind),))
            else:
                await self._app(scope, receive, answer)
        finally:
            # The query is left out, because it may hold the token. `ascii` keeps line feeds and escapes out of the log.
            took_ms = (time.perf_counter() - began) * 1e3
            log.info("%s %s %d %.0fms", asked.method, ascii(asked.path)[1:-1][:200], status, took_ms)


def _with_headers(message: Message, path: str) -> Message:
    """The start of a response with the headers that all have. CORS headers never are among them."""
    given = [(name.lower(), value) for name, value in message.get("headers", ())]
    drawing = (b"content-type", b"image/svg+xml") in given and path.startswith("/api/")
    stranger = message["status"] == 401 and path == "/"
    secure = security_headers(path, drawing=drawing, stranger=stranger)
    ours = [(name.encode(), value.encode()) for name, value in secure]
    names = {name for name, _ in ours}
    return {**message, "headers": [*(pair for pair in given if pair[0] not in names), *ours]}


def _worded(refused: Refused, asked: Asked) -> tuple[str, bytes]:
    """A refusal's type and body: JSON, or for a person who opens the page without the cookie, a page that helps."""
    if refused.status == 401 and asked.path == "/":
        return "text/html; charset=utf-8", stranger.PAGE.encode()
    return "application/json", json.dumps({"error": {"kind": refused.kind, "message": refused.message}}).encode()


async def _respond(send: Send, status: int, body: bytes, headers: tuple[tuple[str, str], ...]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in (*headers, ("content-length", str(len(body))))]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
