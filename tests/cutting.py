"""A proxy that cuts the first two connections of each request, for servers that close a connection after each answer.

Two, because aiohttp sends a request that may be repeated a second time by itself.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

WAYS = 4  # before the request, within it, after it and before its answer, within its answer
_RESET = struct.pack("ii", 1, 0)  # close with a reset


class Proxy:
    """Counts what it cuts. Request and answer are read whole, so where a connection is cut depends on nothing else."""

    def __init__(self, target: tuple[str, int], first: int) -> None:
        self._target, self._way = target, first
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._seen = Counter[bytes]()  # request lines
        self.cuts = 0
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread.start()

    def close(self) -> None:
        """Serve no longer."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, suppress(ConnectionError):
                self._respond(client, _request(client))

    def _respond(self, client: socket.socket, request: bytes) -> None:
        line = request.partition(b"\r\n")[0]
        self._seen[line] += 1
        if self._seen[line] > 2:
            client.sendall(self._answer(request))
            return
        self.cuts += 1
        self._cut(client, request, self._way % WAYS)
        self._way += 1

    def _cut(self, client: socket.socket, request: bytes, way: int) -> None:
        if way > 0:
            answer = self._answer(request if way > 1 else request[: len(request) // 2])
            if way == 3:
                client.sendall(answer[: len(answer) * 2 // 3])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _answer(self, request: bytes) -> bytes:
        with socket.create_connection(self._target) as server:
            server.sendall(request)
            server.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: server.recv(1 << 16), b""))


def _request(client: socket.socket) -> bytes:
    """One whole HTTP request, whose client may wait for a word before it sends the body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(client)
    head, _, body = data.partition(b"\r\n\r\n")
    fields = {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(b":") for x in head.split(b"\r\n"))
    }
    if fields.pop(b"expect", b"").lower() == b"100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = b"\r\n".join(x for x in head.split(b"\r\n") if not x.lower().startswith(b"expect:"))
    while len(body) < int(fields.get(b"content-length", 0)):
        body += _received(client)
    return head + b"\r\n\r\n" + body


def _received(client: socket.socket) -> bytes:
    if data := client.recv(1 << 16):
        return data
    raise ConnectionError("the client has gone")


@contextmanager
def proxy(endpoint: str, first: int) -> Iterator[Proxy]:
    """A proxy before a server; its first cut is in this way, of WAYS."""
    parts = urlsplit(endpoint)
    assert parts.hostname
    assert parts.port
    cut = Proxy((parts.hostname, parts.port), first)
    try:
        yield cut
    finally:
        cut.close()
