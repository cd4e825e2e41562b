"""The benchmark of the store runs, at a small size, and writes what its page promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.scripts import load


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation is measured, for schedules of more than one size."""
    script = load("bench_store")
    monkeypatch.setattr(script, "LIMIT_MS", float("inf"))
    monkeypatch.setattr(sys, "argv", ["bench_store.py", "--schedules", "12", "--out", str(tmp_path / "store")])
    assert script.main() == 0
    figures = json.loads((tmp_path / "store.json").read_text())
    assert figures["schedules"] == 12
    assert figures["text_bytes"]["largest"] > figures["text_bytes"]["median"]
    page = (tmp_path / "store.md").read_text()
    for row in figures["results"]:
        assert 0 < row["median_ms"] <= row["p99_ms"] <= row["longest_ms"]
        assert f"| {row['what']} | {row['calls']} |" in page
    assert len(figures["results"]) == 8
