"""The Grafana dashboard, as JSON to import."""

from __future__ import annotations

from pathlib import Path


def dashboard() -> str:
    """The dashboard's JSON."""
    return Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
