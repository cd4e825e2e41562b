"""The report of distances to the bounds, on the CPU."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.scripts import load

TINY = "torchvision:squeezenet1_1@32"
OPTIONS = Namespace(device="cpu", dtype="fp32", batch=1, fuse="off", budget=60.0)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("measure_bounds")


@pytest.fixture(scope="module")
def row(script: ModuleType) -> Iterator[dict[str, Any]]:
    """A small model's row. Measuring sets the process's precision, as it is put back here."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    yield script.measure(TINY, OPTIONS)
    torch.set_float32_matmul_precision(matmul)
    backends: Any = torch.backends
    for backend in (backends.mkldnn.matmul, backends.cuda.matmul):
        backend.fp32_precision = "none"  # as in a fresh process, which the line above does not give back
    cudnn.allow_tf32, cudnn.benchmark = before


def test_a_row_holds_replay_bounds_and_ratios(row: dict[str, Any]) -> None:
    """The distance that is left, and what the schedule and its graph are like."""
    assert row["failure"] is None
    assert 0 < row["critical_path_us"] <= row["total_work_us"]
    assert row["over_critical_path"] == row["replay_us"] / row["critical_path_us"]
    assert row["over_total_work"] == row["replay_us"] / row["total_work_us"]
    assert (row["width"], row["streams"], row["syncs_used"]) == (2, 1, 0)
    assert row["syncs_needed"] > 0
    assert row["tasks"] > 50
    assert row["peak_bytes"] > 0
    assert row["environment"]["versions"]["torch"] == torch.__version__


def test_table_and_json_are_written_as_models_are_done(
    script: ModuleType, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a model, also for one that has no figures; then the status is 1."""
    result, page = tmp_path / "bounds.json", tmp_path / "bounds.md"
    answers = {TINY: dict(row), "googlenet": {"model": "googlenet", "failure": "ended with status 9"}}
    monkeypatch.setattr(script, "in_own_process", lambda model, _words: answers[model])
    monkeypatch.setattr(sys, "argv", ["measure_bounds", *answers, "--json", str(result), "--table", str(page)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 1
    written = json.loads(result.read_text())
    assert written["environment"] == row["environment"]
    assert [r["failure"] for r in written["results"]] == [None, "ended with status 9"]
    lines = page.read_text().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith(f"| {TINY} | fp32 | 1 | {row['replay_us']:.0f} µs | {row['critical_path_us']:.0f} µs |")
    assert lines[3].startswith("| googlenet | ended with status 9 |")


def test_a_process_that_fails_is_a_row(script: ModuleType) -> None:
    """Whatever ends the process of a model, the others are measured."""
    found = script.in_own_process("googlenet", ["--dtype", "none such"])
    assert found == {"model": "googlenet", "failure": "ended with status 2; its last words are above"}
