"""Operators whose results vary are found before a training, and a resume of it does not claim to be exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.workloads import Stop
from tests.trainings import Attempt, lay_out, spec_of

MODEL = """
import torch
from torch import nn


class Put(nn.Module):
    # put_ without accumulation is what torch has no deterministic implementation of, even on a CPU
    def forward(self, x):
        return torch.zeros_like(x).put(torch.arange(x.numel()).view(x.shape), x)


def put():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), Put(), nn.BatchNorm1d(4))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    (found / "put.py").write_text(MODEL)
    return found


@pytest.mark.parametrize("on_miss", ["eager", "build"])
def test_an_operator_that_may_vary(folder: Path, on_miss: str) -> None:
    """The job names the operator once; it resumes after an interruption and says that this is not exact."""
    spec = spec_of(
        folder, output=f"{on_miss}/net", schedule__on_miss=on_miss, model__source=f"python:{folder}/put.py:put"
    )
    first = Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= 3 else Stop.GO)
    first.run()
    second = Attempt(spec, number=2)
    second.run()
    for attempt in (first, second):
        (said,) = attempt.said("not-repeatable")
        assert said.startswith("put_ can give different bits in each run on this device;")
    (resumed,) = [event for event in second.events if event[0] == "resumed"]
    assert resumed[1].endswith(
        "; not bit for bit like an uninterrupted training: put_ can give different bits in each run"
    )
    assert resumed[2]["exact"] is False
    assert spec.output.path.exists()


def test_one_that_never_varies(folder: Path) -> None:
    """A model without such operators causes no event."""
    attempt = Attempt(spec_of(folder, output="steady/net", schedule__on_miss="eager"))
    attempt.run()
    assert attempt.said("not-repeatable") == []


@pytest.mark.parametrize("enabled", [False, True])
def test_switches_are_put_back(enabled: bool) -> None:
    """The process's own choice of switches is restored."""
    torch.use_deterministic_algorithms(enabled)
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    try:
        before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
        with as_in_training(torch.device("cpu")):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            torch.zeros(2).put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))  # no warning, and no error
        assert (cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory) == before
        assert torch.are_deterministic_algorithms_enabled() is enabled
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
