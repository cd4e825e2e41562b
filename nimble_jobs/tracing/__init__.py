"""Attempts as OpenTelemetry traces. Needs the extra `opentelemetry`, which only `tracer` imports."""

from nimble_jobs.tracing.attempts import SpanValues, attempt_span
from nimble_jobs.tracing.context import submitter_traceparent, valid_traceparent
from nimble_jobs.tracing.target import Target, target_of

__all__ = ["SpanValues", "Target", "attempt_span", "submitter_traceparent", "target_of", "valid_traceparent"]
