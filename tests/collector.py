"""A real OTLP/HTTP collector on this machine, which can fail, hang, and close in the middle of an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span as it arrived. Ids are hex; times are nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None  # None: the status is unset
    resource: dict[str, Any]


@dataclass(kw_only=True)
class Collector:
    """What it got, and how it answers from here on."""

    port: int = 0
    status: int = 200
    hang_s: float = 0.0  # before an answer
    closes: bool = False  # drops the connection instead of answering
    requests: int = 0
    paths: set[str] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)  # of requests that were answered with success
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens inside the block."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            collector.requests += 1
            collector.paths.add(self.path)
            if collector.hang_s and collector.released.wait(collector.hang_s):
                return
            if collector.closes:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if collector.status == 200:
                collector.spans += spans_of(body)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the base class
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up in these tests
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        collector.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def spans_of(body: bytes) -> list[Span]:
    """The spans of a request, oldest first."""
    request = ExportTraceServiceRequest.FromString(body)
    spans = [
        Span(
            name=span.name,
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_plain(span.attributes),
            error=span.status.message if span.status.code == 2 else None,
            resource=_plain(each.resource.attributes),
        )
        for each in request.resource_spans
        for scope in each.scope_spans
        for span in scope.spans
    ]
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
