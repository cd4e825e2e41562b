"""Plans launched on real streams and events under CUDA Stream Sanitizer: clean, and not without any one event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sanitizer import CAPS, WHOLE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.sanitized"],
        cwd=ROOT,
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("arena", [False, True], ids=["as recorded", "arena"])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("name", WHOLE)
def test_a_plan_is_clean_and_without_any_one_wait_or_event_it_is_not(
    name: str, cap: int | None, arena: bool, report: dict[str, Any]
) -> None:
    """Four launches are clean; leaving out one wait, or not recording one event, is reported each time."""
    case = report["cases"][f"{name} {cap} {arena}"]
    assert case["streams"] >= 2
    assert case["whole"] == [None] * 3
    assert case["whole again"] is None
    assert case["waits"]
    assert all("data race" in str(said) for said in case["waits"]), case["waits"]
    assert len(case["events"]) >= 2
    assert all("data race" in str(said) for said in case["events"]), case["events"]


@pytest.mark.parametrize("name", WHOLE)
def test_memory_by_program_order_is_a_race(name: str, report: dict[str, Any]) -> None:
    """Tensors of parallel branches at the same place of the arena are reported."""
    assert "data race" in str(report["memory by program order"][name])
