"""A real receiver of webhooks and pings on this machine, which can fail, hang, drip, redirect and come back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Message:
    """One request that arrived whole."""

    path: str
    headers: dict[str, str]
    text: str
    answered: int
    at: float  # of the monotonic clock

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(kw_only=True)
class Receiver:
    """What it got, and how it answers from here on."""

    port: int = 0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0  # before an answer
    drip_s: float = 0.0  # between the bytes of an answer
    messages: list[Message] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def taken(self) -> list[Message]:
        """Those that were answered with success."""
        return [message for message in self.messages if 200 <= message.answered < 300]


@contextmanager
def receiving(look: Callable[[Message], None] = lambda _: None) -> Iterator[Receiver]:
    """A receiver that listens inside the block, and calls `look` with each message before it answers."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            status = receiver.status
            if receiver.hang_s:
                receiver.released.wait(receiver.hang_s)
            head = {name.lower(): value for name, value in self.headers.items()}
            message = Message(path=self.path, headers=head, text=text, answered=status, at=time.monotonic())
            look(message)
            receiver.messages.append(message)
            answer = [f"HTTP/1.1 {status} Answer", *(f"{k}: {v}" for k, v in receiver.headers.items())]
            raw = "\r\n".join([*answer, "Content-Length: 0", "Connection: close", "", ""]).encode()
            try:
                for byte in (raw[i : i + 1] for i in range(len(raw))) if receiver.drip_s else (raw,):
                    self.wfile.write(byte)
                    self.wfile.flush()
                    if receiver.drip_s and receiver.released.wait(receiver.drip_s):
                        return
            except OSError:  # it did not wait
                return

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
