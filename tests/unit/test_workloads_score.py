"""The score workload over readers and models that stand in for real ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.data import open_reader
from nimble_jobs.errors import DataError
from nimble_jobs.spec import RunSpec
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.workloads import score
from nimble_jobs.workloads.context import Stop


class AllInFlight:
    """A model that takes every batch before it gives the first result, as many replays in flight do."""

    request = SimpleNamespace(batch_size=4)

    def run(self, batches: Iterable[tuple[torch.Tensor, Any]]) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
        for x, batch in list(batches):
            yield {"output": x}, batch


@pytest.mark.parametrize(("threshold", "fails"), [(0.2, True), (0.25, False), (-1.0, False)])
def test_the_threshold_counts_batches_in_flight(tmp_path: Path, threshold: float, fails: bool) -> None:
    """Four bad records of sixteen, one a batch: more than a fifth, whenever the results come."""
    x = np.ones((16, 3), dtype=np.float32)
    x[::4] = np.nan
    np.save(tmp_path / "x.npy", x)
    spec = SimpleNamespace(output=SimpleNamespace(fields=["id"]), run=RunSpec(error_threshold=threshold))
    context: Any = SimpleNamespace(spec=spec, stop=lambda: Stop.GO, report=lambda **_: None)
    tally = score._Tally()
    with open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy")) as reader:
        if fails:
            with pytest.raises(DataError, match=r"^4 of 16 records are bad"):
                score._score(context, reader, AllInFlight(), 0, 16, tally)  # type: ignore[arg-type]
        else:
            columns, bad = score._score(context, reader, AllInFlight(), 0, 16, tally)  # type: ignore[arg-type]
            assert (len(columns["id"]), len(bad), tally.done, tally.bad) == (12, 4, 16, 4)
