"""A training under a real worker: SIGTERM keeps the step and gives the job back; another worker goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nimble_jobs import client
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.trainings import MODEL, digests, lay_out
from tests.waiting import PATIENCE_S, until

SPEC = """
version: 1
name: {name}
kind: finetune
model: {{source: "python:model.py:net"}}
input: {{source: train.npz, format: npz, fields: {{x: images, label: labels}}, batch_size: 8}}
output: {{path: out/net, if_exists: replace}}
schedule: {{on_miss: eager}}
train:
  epochs: 60
  checkpoint: {{every_epochs: 60}}
"""
# In training, a job does not begin its 101st step as long as there is a file `held`; there, it leaves a file `reached`.
GATE = """

import time
from pathlib import Path

HERE = Path(__file__).parent


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = ungated()
        self.steps = 0

    def forward(self, x):
        if self.training:
            self.steps += 1
            while self.steps > 100 and (HERE / "held").exists():
                (HERE / "reached").touch()
                time.sleep(0.01)
        return self.net(x)


def net():
    return Gate()
"""
SCORE = """
version: 1
name: score
kind: score
model: {source: "python:model.py:net", weights: out/net/model.safetensors}
input: {source: held-out.npz, format: npz, fields: {x: images, label: labels}, batch_size: 8}
output: {path: out/score, format: npy, fields: [label, top1]}
"""


def start(store: Store, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(store.home), "--device", "cpu"]
    with log.open("a") as file:
        return prefork.start(command, stderr=file, stdout=file, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.timeout(300)
def test_a_worker_that_is_told_to_stop(tmp_path: Path) -> None:
    """A worker that stops takes a checkpoint, so no step is lost. The resumed job publishes the undisturbed bytes."""
    lay_out(tmp_path)
    (tmp_path / "model.py").write_text(MODEL.replace("def net(", "def ungated(") + GATE)
    spec = tmp_path / "net.yaml"
    spec.write_text(SPEC.format(name="net"))
    (tmp_path / "score.yaml").write_text(SCORE)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        worker = start(store, tmp_path / "log")
        try:
            whole = client.submit(spec, store=store, allow_python=[tmp_path])
            client.wait([whole.id], store=store, timeout_s=120)
            expected = digests(tmp_path / "out/net")
            (tmp_path / "held").touch()
            stopped = client.submit(spec, overrides=["output.path=out/again"], store=store, allow_python=[tmp_path])
            until((tmp_path / "reached").exists)
            worker.send_signal(signal.SIGTERM)
            until(lambda: "asked to stop" in (tmp_path / "log").read_text())
            (tmp_path / "held").unlink()
            assert worker.wait(timeout=PATIENCE_S) == 0
            assert store.jobs.get(stopped.id).state is JobState.QUEUED
            (kept,) = (tmp_path / "out").glob(".again.training/*/step-*")
            worker = start(store, tmp_path / "log")
            score = client.submit(tmp_path / "score.yaml", store=store, allow_python=[tmp_path])
            done, scored = client.wait([stopped.id, score.id], store=store, timeout_s=120)
        finally:
            worker.kill()
            worker.wait()
            print((tmp_path / "log").read_text()[-5000:])
        assert (done.state, scored.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
        assert digests(tmp_path / "out/again") == expected
        events = {event.kind: event for event in store.jobs.events(stopped.id)}
        assert events["resumed"].data["step"] == int(kept.name.removeprefix("step-")) == events["stopped"].data["step"]
        assert [a.outcome for a in store.jobs.attempts(stopped.id)] == ["requeued", "succeeded"]
        assert done.records_done == done.records_total
    assert load_file(tmp_path / "out/again/model.safetensors").keys()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["again", "net", "score"]
