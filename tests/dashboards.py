"""A dashboard as a process of its own, asked over real connections."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests import prefork
from tests.waiting import PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]  # names in lower case; the last of several equal ones
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(kw_only=True)
class Dashboard:
    """A running `nimble-jobs dashboard`."""

    process: subprocess.Popen[str]
    address: str
    port: int
    token: str
    cookie: str = ""
    csrf: str = ""

    @classmethod
    def started(cls, home: Path, *options: str, port: int = 0) -> Self:
        """Start one, and sign in."""
        command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", home, "dashboard", "--port", port, *options]
        process = prefork.start(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        assert address.port is not None, "the dashboard did not start"
        token = parse_qs(address.query)["token"][0]
        board = cls(process=process, address=str(address.hostname), port=address.port, token=token)
        reply = board.ask("GET", f"/?token={board.token}")
        assert reply.status == 303
        board.cookie = reply.headers["set-cookie"].partition(";")[0]
        board.csrf = board.get("/api/overview")["csrf"]
        return board

    @property
    def host(self) -> str:
        return f"{self.address}:{self.port}"

    def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Reply:
        """One request over a connection of its own, with exactly these headers and `Host`."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=PATIENCE_S)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in {"Host": self.host, **(headers or {})}.items():
                connection.putheader(name, value)
            if body:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(status=response.status, headers=names, body=response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON at a path, as the page asks for it."""
        reply = self.ask("GET", path, {"Cookie": self.cookie})
        assert reply.status == 200, (path, reply.status, reply.body)
        return reply.json

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """A change, as the page asks for it."""
        headers = {"Cookie": self.cookie, "Origin": f"http://{self.host}", "X-CSRF-Token": self.csrf}
        return self.ask("POST", path, headers, json.dumps(body or {}).encode())

    @contextmanager
    def stream(self, after: int | None = None, *, last: int | None = None) -> Iterator[Stream]:
        """An open stream; `last`: as a browser that comes back."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=PATIENCE_S)
        headers = {"Cookie": self.cookie} | ({} if last is None else {"Last-Event-ID": str(last)})
        try:
            connection.request("GET", "/api/stream" + ("" if after is None else f"?after={after}"), headers=headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield Stream(response)
        finally:
            connection.close()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(how)
        return self.process.wait(timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(frozen=True, kw_only=True)
class Message:
    """A server-sent event."""

    name: str
    number: int | None
    data: Any


class Stream:
    """Reads server-sent events as browsers do."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def __iter__(self) -> Iterator[Message]:
        """Messages until the stream ends."""
        fields: dict[str, str] = {}
        while line := self._response.readline():
            text = line.decode().rstrip("\n")
            if not text and "data" in fields:
                number = fields.get("id")
                data = json.loads(fields["data"])
                yield Message(name=fields["event"], number=None if number is None else int(number), data=data)
            if not text:
                fields = {}
            elif not text.startswith(":"):
                name, _, value = text.partition(": ")
                fields[name] = value

    def events(self, count: int) -> list[Message]:
        """The next `count` events of the store."""
        found: list[Message] = []
        for message in self:
            if message.name == "event":
                found.append(message)
            if len(found) == count:
                return found
        raise AssertionError(f"the stream ended after {len(found)} events")
