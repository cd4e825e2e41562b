"""Sends spans over OTLP/HTTP, in batches and from a thread of its own, so that a collector never delays a job."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nimble_jobs.tracing.attempts import SpanValues
from nimble_jobs.tracing.target import Target
from nimble_jobs.version import __version__

_SERVICE = "nimble-jobs"
_NS = 1e9


class Tracer:
    """An open connection to a collector.

    Headers, timeouts, compression, certificates, sampler, batch sizes and the resource come from OpenTelemetry's
    environment variables. Spans that do not fit the queue are dropped.
    """

    def __init__(self, target: Target, environ: Mapping[str, str] | None = None) -> None:
        self._provider = TracerProvider(
            resource=Resource.create(_resource(os.environ if environ is None else environ)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target.endpoint)))
        self._tracer = self._provider.get_tracer("nimble_jobs", __version__)

    def send(self, span: SpanValues) -> None:
        """Put a span and its children into the queue. Returns at once."""
        self._send(span, _context_of(span.parent))

    def close(self, limit_s: float) -> bool:
        """Send what is in the queue, for at most `limit_s`. Returns whether that was enough."""
        closing = threading.Thread(target=self._provider.shutdown, name="nimble-jobs traces", daemon=True)
        closing.start()
        closing.join(limit_s)
        return not closing.is_alive()

    def _send(self, span: SpanValues, context: Context) -> None:
        sent = self._tracer.start_span(
            span.name, context=context, start_time=_ns(span.start_s), attributes=dict(span.attributes)
        )
        for child in span.children:
            self._send(child, set_span_in_context(sent, Context()))
        if span.error is not None:
            sent.set_status(Status(StatusCode.ERROR, span.error))
        sent.end(_ns(span.end_s))


def _resource(environ: Mapping[str, str]) -> dict[str, Any]:
    """The service's version, and its name unless the environment gives one."""
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {"service.version": __version__} | ({} if named else {"service.name": _SERVICE})


def _context_of(traceparent: str | None) -> Context:
    if traceparent is None:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
