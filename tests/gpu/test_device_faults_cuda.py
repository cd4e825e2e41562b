"""Token ids out of range on a GPU: named on the host where they can be, and else a fault that harms no other job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve

MODEL = """\
import torch


class Net(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.words, self.out, self.hidden = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 3), hidden

    def forward(self, x):
        if self.hidden:  # what is looked up is computed, so nobody sees on the host that it is out of range
            x = torch.where(x < 0, 5000, x)
        return self.out(self.words(x).mean(1))


def make(hidden):
    return Net(hidden)
"""
SPEC = """\
version: 1
name: {name}
kind: score
model: {{source: "python:model.py:make", args: {{hidden: {hidden}}}}}
input: {{source: {name}.npy, format: npy, batch_size: 4}}
schedule: {{progressive: false}}
output: {{path: out-{name}, fields: [id, top1]}}
run: {{device: cuda, retry: {{max_attempts: 2, initial: 100ms}}}}
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "model.py").write_text(MODEL)
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def submit(store: Store, folder: Path, name: str, wrong: int | None, *, hidden: bool) -> Job:
    """A job over eight rows of ids below 100, one of which is `wrong`."""
    x = np.random.default_rng(0).integers(0, 100, (8, 20))
    if wrong is not None:
        x[5, 3] = wrong
    np.save(folder / f"{name}.npy", x)
    spec = folder / f"{name}.yaml"
    spec.write_text(SPEC.format(name=name, hidden=str(hidden).lower()))
    return client.submit(spec, store=store, allow_python=[folder])


def test_ids_out_of_range(store: Store, tmp_path: Path) -> None:
    """An assertion on the device ends its process and fails its job after the last attempt; the others run."""
    named = submit(store, tmp_path, "named", 100, hidden=False)
    hidden = submit(store, tmp_path, "hidden", -1, hidden=True)
    good = submit(store, tmp_path, "good", None, hidden=True)
    client.start_worker(store=store, device="cuda")
    try:
        named, hidden, good = client.wait([named.id, hidden.id, good.id], store=store, timeout_s=240)
    finally:
        client.stop_workers(store=store)
    assert (named.state, named.attempt) == (JobState.FAILED, 1)
    place = f"{tmp_path}/named.npy: record 5"
    assert f"{place}: holds 100 at [3]; expected 0 to 99: the model looks it up in a table of 100 rows" in (
        named.error or ""
    )
    assert (hidden.state, hidden.attempt) == (JobState.FAILED, 2)
    assert "device-side assert" in (hidden.error or "")
    assert (good.state, good.attempt, good.records_done) == (JobState.SUCCEEDED, 1, 8)
    assert store.check() == []
