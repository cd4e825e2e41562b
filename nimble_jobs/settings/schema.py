"""The JSON Schema of config.yaml, so that editors complete and check it."""

from __future__ import annotations

from typing import Any

from nimble_jobs.settings.model import Settings


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of what may be written in YAML: durations and sizes as texts too."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Settings.model_json_schema(mode="validation"),
        "title": "nimble-jobs configuration",
    }
