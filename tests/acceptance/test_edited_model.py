"""A worker that lives on while somebody edits code that its models import from the import path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from nimble_jobs import client
from nimble_jobs.job import JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.waiting import PATIENCE_S

MODEL = """
import torch
import factor_beside_the_models

class Net(torch.nn.Module):
    def forward(self, x):
        return x * factor_beside_the_models.factor

def net():
    return Net()
"""
SPEC = """
version: 1
name: net
kind: score
model: {source: "python:model.py:net"}
input: {source: x.npy, format: npy, batch_size: 4}
schedule: {progressive: false}
output: {path: out, format: npy, fields: [id, logits], if_exists: replace}
"""


@pytest.mark.timeout(300)
def test_a_worker_runs_what_the_files_say(tmp_path: Path) -> None:
    """After each edit the job is tried again in a new process and computes with the new code; a schedule of the old
    code under the new key would be a hit with the old numbers, in this worker or in the next one.
    """
    helper = tmp_path / "path" / "factor_beside_the_models.py"
    helper.parent.mkdir()
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "net.yaml").write_text(SPEC)
    np.save(tmp_path / "x.npy", np.ones((8, 3), np.float32))
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nimble_jobs.worker", "--device", "cpu", "--home"]
    with open_store(resolve(str(tmp_path / "home"))) as store:

        def outcomes() -> list[str | None]:
            job = client.submit(tmp_path / "net.yaml", store=store, allow_python=[tmp_path])
            (done,) = client.wait([job.id], store=store, timeout_s=PATIENCE_S)
            assert done.state is JobState.SUCCEEDED, done.error
            found = np.concatenate([np.load(file) for file in sorted((tmp_path / "out").rglob("*logits*.npy"))])
            assert np.array_equal(found, np.full((8, 3), np.float32(factor)))
            return [done.schedule["hit"], *(attempt.outcome for attempt in store.jobs.attempts(job.id))]

        for lives in range(2):
            with (tmp_path / "log").open("a") as log:
                worker = prefork.start(  # its folder is the first one on its import path
                    [*command, str(store.home)], cwd=helper.parent, env=one_thread, stderr=log, stdout=log
                )
            try:
                found = []
                for factor in (2.0, 2.0005, 2.001)[lives:]:
                    helper.write_text(f"factor = {factor}\n")
                    found.append(outcomes())
            finally:
                worker.kill()
                worker.wait()
            hit = "stored" if lives else "miss"
            assert found == [[hit, "succeeded"], *[[hit, "failed", "succeeded"]] * (2 - lives)]
        assert len(store.schedules.list()) == 3
