"""Whether traces are sent, and where to: `tracing.endpoint`, or the usual variables of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nimble_jobs.settings import Settings

_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ALL = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PATH = "v1/traces"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where traces go. `endpoint` is the whole address; None: the one that OpenTelemetry's variables name."""

    endpoint: str | None


def target_of(settings: Settings, environ: Mapping[str, str]) -> Target | None:
    """The target; None if traces are off, which is the default.

    They are on if `tracing.endpoint` is set, or else one of OpenTelemetry's variables for an endpoint. Two of its other
    variables turn them off: OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none.
    """
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return None
    base = settings.tracing.endpoint
    if base is not None:
        return Target(endpoint=f"{base.rstrip('/')}/{_PATH}")
    return Target(endpoint=None) if environ.get(_TRACES) or environ.get(_ALL) else None
