"""A job that begins in eager on a real GPU: what its kernels take, and a move to eager's kernels in one graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.payback import Plan
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import real_station
from tests.unit import test_first_runs as jobs

quickly = jobs.quickly


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def test_kernels_take_less_than_their_launches(device: torch.device) -> None:
    """Of many small layers the gaps are most of the time, and the spinning kernel before them does not count."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))).to(device)
    x = torch.zeros(1, 8, device=device)
    with torch.no_grad():
        call_us = measure.time_us(lambda: module(x), device)
        kernels_us = measure.kernels_us(lambda: module(x), call_us, device)
    assert 0 < kernels_us < call_us


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("plan", [Plan.QUICK, Plan.QUICK_BESIDE])
def test_a_job_moves(plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record for record it gives what eager gives. TF32 may round otherwise from kernel to kernel."""
    model = "torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(30)))"
    station = replace(real_station(store, "w", "cuda", None), builders=jobs.Later(store, 0))
    jobs.run(store, tmp_path, station, model=model, on_miss="eager")
    expected = jobs.output(tmp_path)
    jobs.decided(monkeypatch, plan)
    job = jobs.run(store, tmp_path, station, model=model)
    np.testing.assert_allclose(jobs.output(tmp_path), expected, rtol=1e-2, atol=1e-3)
    assert [move["to"] for move in job.schedule["first_run"]["moves"]] == ["quick"]
    assert job.schedule["runs"] == "schedule"
