"""What a job would decide if its schedule were not stored, before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads import forecast as forecasts
from nimble_jobs.workloads.ahead import asked
from nimble_jobs.workloads.forecast import forecast


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def foreseen(store: Store, folder: Path, *, eager_us: float | None, **schedule: Any) -> dict[str, Any] | None:
    """For 10,000 records in batches of ten."""
    (folder / "model.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(2, 2)\n")
    np.save(folder / "x.npy", np.zeros((10_000, 2), dtype=np.float32))
    spec = specs.restore(
        {
            "version": 1,
            "name": "n",
            "kind": "score",
            "model": {"source": f"python:{folder}/model.py:net"},
            "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": 10},
            "schedule": schedule,
            "output": {"path": str(folder / "out"), "fields": ["id", "logits"]},
        }
    )
    request, _ = asked(spec, (folder,), None)
    answer = {"eager_us": eager_us, "key_parts": {"model.source": spec.model.source}}
    return forecast(spec, request, torch.device("cpu"), answer, store)


@pytest.mark.parametrize("schedule", [{"on_miss": "eager"}, {"on_miss": "fail"}, {"progressive": False}])
def test_only_a_job_that_decides_has_a_forecast(store: Store, tmp_path: Path, schedule: dict[str, Any]) -> None:
    assert foreseen(store, tmp_path, eager_us=1e3, **schedule) is None


def test_nothing_is_foreseen_without_a_measurement(store: Store, tmp_path: Path) -> None:
    """Only how the job will decide."""
    found = foreseen(store, tmp_path, eager_us=None)
    assert found is not None
    assert (found["plan"], found["why"].split(" and ")[0]) == (None, "a job begins in eager")


def test_all_records_count(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 calls of a millisecond pay for no build; 1,000 of a second pay for one beside the job, on idle cores."""
    monkeypatch.setattr(forecasts, "idle_cores", lambda _: 64.0)
    short, long = (foreseen(store, tmp_path, eager_us=us) for us in (1e3, 1e6))
    assert short is not None
    assert long is not None
    assert (short["plan"], short["cost_s"], short["saving_s"]) == ("nothing", 0.0, 0.0)
    assert "10,000 records left would take 1.0 s in eager" in short["why"]
    assert "beside" in long["plan"]
    assert long["saving_s"] > long["cost_s"] > 0
