"""Workers of two state folders over one PostgreSQL database: a worker is stopped past its lease, and goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from nimble_jobs import client
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import postgres, zygote
from tests.waiting import PATIENCE_S, until

LEASE_S = 20.0  # a quarter of it is left when a child ends by itself, so a busy machine does not miss that
MODEL = """
import time
from pathlib import Path
import torch

HERE = Path(__file__)

class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.01)
        while x[0, 0] >= 80 and not HERE.with_name("go").exists():
            time.sleep(0.01)
        return x.sum(1, keepdim=True)

def slow():
    return Slow()
"""
SPEC = """
version: 1
name: slow
kind: score
model: {source: "python:model.py:slow"}
input: {source: x.npy, format: npy, batch_size: 8}
output: {path: out, format: npy, fields: [logits], shard_size: 8}
run: {retry: {initial: 0s}}
"""


def worker(home: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(home), "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def child_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    (child,) = zygote.spawned(process.pid)
    return child


def ids(store: Store) -> set[str]:
    return {info.id for info in store.workers.live("worker")}


def test_a_worker_is_stopped_past_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child ends by itself while the lease still runs. The worker of the other folder then takes the job over and
    goes on from the last shard. The stopped one, continued, writes nothing and becomes another worker.
    """
    monkeypatch.setenv("NIMBLE_JOBS_LEASE_S", str(LEASE_S))
    monkeypatch.setenv("NIMBLE_JOBS_EAGER", "candidate")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC)
    records = np.arange(400, dtype=np.float32).reshape(200, 2)
    np.save(tmp_path / "x.npy", records)
    started: list[subprocess.Popen[bytes]] = []
    with postgres.schema() as url:
        monkeypatch.setenv("NIMBLE_JOBS_DB", url)
        one, other = (resolve(str(tmp_path / name)) for name in ("one", "other"))
        with open_store(one) as store:
            try:
                job = client.submit(tmp_path / "job.yaml", store=store, allow_python=[tmp_path])
                started.append(stopped := worker(other))
                until(lambda: store.jobs.get(job.id).records_done >= 8)
                (first,) = ids(store)
                child = child_of(stopped)
                stopped.send_signal(signal.SIGSTOP)
                until(lambda: child.status() == psutil.STATUS_ZOMBIE)
                assert store.workers.alive(first)
                assert store.jobs.get(job.id).state is JobState.RUNNING
                (tmp_path / "go").touch()
                started.append(worker(one))
                client.wait([job.id], store=store, timeout_s=PATIENCE_S)
                before = store.jobs.events(job.id)
                stopped.send_signal(signal.SIGCONT)
                until(lambda: len(ids(store)) == 2)
                assert first not in ids(store)
                assert store.jobs.events(job.id) == before
                ended = store.jobs.get(job.id)
                assert (ended.state, ended.attempt, ended.records_done) == (JobState.SUCCEEDED, 2, 200)
                assert [attempt.outcome for attempt in store.jobs.attempts(job.id)] == ["lost", "succeeded"]
                assert store.check() == []
            finally:
                for process in started:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
                for process in started:
                    assert process.wait(PATIENCE_S) == 0
    shards = [np.load(path) for path in sorted((tmp_path / "out").glob("*.npy"))]
    assert np.array_equal(np.concatenate(shards), records.sum(1, keepdims=True))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]
