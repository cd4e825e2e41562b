"""The plan of a job's buckets, as an earlier attempt noted it, is believed only in the form in which it was written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nimble_jobs.errors import DataError
from nimble_jobs.workloads.text.job import plan_of


@pytest.mark.parametrize(
    "noted",
    [
        {},
        [],
        "buckets",
        {"buckets": [16, 32]},
        {"buckets": [16, 32], "shares": [1.0]},
        {"buckets": [], "shares": []},
        {"buckets": [32, 16], "shares": [0.5, 0.5]},
        {"buckets": [16, 16], "shares": [0.5, 0.5]},
        {"buckets": [16, "32"], "shares": [0.5, 0.5]},
        {"buckets": [0, 32], "shares": [0.5, 0.5]},
        {"buckets": [16, 65], "shares": [0.5, 0.5]},
        {"buckets": [16, 32], "shares": [0.5, None]},
        {"buckets": [16, 32], "shares": [0.5, 1.5]},
    ],
)
def test_a_damaged_note(noted: Any) -> None:
    setup: Any = SimpleNamespace(limit=64)
    nothing: Any = None
    with pytest.raises(DataError, match=r"noted beside its output about buckets of texts is damaged"):
        plan_of(nothing, setup, nothing, fields=(), device=torch.device("cpu"), store=nothing, noted=noted)
