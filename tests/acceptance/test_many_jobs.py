"""Many small jobs over few models to one worker of real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nimble_jobs import client
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests.cli import Cli

JOBS = 24
WIDTHS = (8, 12)
MODEL = """
import torch

def small(width):
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))
"""
SPEC = """
version: 1
name: job-{number}
kind: score
model: {{source: "python:model.py:small", args: {{width: {width}}}}}
input: {{source: x.npy, format: npy, batch_size: 32}}
schedule: {{progressive: false}}
output: {{path: out/job-{number}, format: npy, fields: [id, logits]}}
"""


def test_one_worker_runs_many_jobs_over_few_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All succeed; each model is built once and stays resident for the rest; equal jobs have equal outputs."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32))
    (tmp_path / "model.py").write_text(MODEL)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        jobs = []
        for number in range(JOBS):
            path = tmp_path / f"job-{number}.yaml"
            path.write_text(SPEC.format(number=number, width=WIDTHS[number % len(WIDTHS)]))
            jobs.append(client.submit(path, store=store, allow_python=[tmp_path]))
        client.start_worker(store=store, device="cpu")
        try:
            done = client.wait([job.id for job in jobs], store=store, timeout_s=120)
            rows = Cli(store.home, capsys)("ls", "--json").json
            cache = Cli(store.home, capsys)("cache", "ls", "--json").json
        finally:
            client.stop_workers(store=store)
        after = Cli(store.home, capsys)("cache", "ls", "--json").json
    assert [(row["state"], row["records_done"], row["attempt"]) for row in rows] == [("succeeded", 32, 1)] * JOBS
    hits = [job.schedule["hit"] for job in done]
    assert hits == ["miss"] * len(WIDTHS) + ["resident"] * (JOBS - len(WIDTHS))
    assert [(bool(row["resident"]), row["hits"]) for row in cache] == [(True, JOBS // len(WIDTHS) - 1)] * len(WIDTHS)
    assert [bool(row["resident"]) for row in after] == [False] * len(WIDTHS)
    for number in range(len(WIDTHS), JOBS):
        ours, first = (
            np.load(tmp_path / "out" / f"job-{n}" / "part-00000.logits.npy") for n in (number, number % len(WIDTHS))
        )
        np.testing.assert_array_equal(ours, first)
