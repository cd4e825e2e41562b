"""The JSON Schema of a spec file, so that editors complete and check it."""

from __future__ import annotations

from typing import Any

from nimble_jobs.spec.model import JobSpec


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of what may be written in YAML: durations as texts too, one number for a square."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobSpec.model_json_schema(mode="validation"),
        "title": "nimble-jobs job",
    }
