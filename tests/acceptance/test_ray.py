"""Workers as actors of a Ray cluster on this machine, and `NimbleScorer` in a pipeline of Ray Data."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from test_how_to import FOLDER, parts_of

from nimble_jobs import client
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.verify import TOLERANCE
from nimble_jobs.errors import UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.ray.workers import order_of, run
from nimble_jobs.store import Store, open_store
from tests import prefork
from tests.ray_cluster import Cluster
from tests.waiting import PATIENCE_S, until

pytest.importorskip("ray", reason="needs the extra ray")

GUIDE = FOLDER / "use-ray.md"
COMMAND = str(Path(sys.executable).with_name("nimble-jobs"))
RECORDS, SHARD, BATCH = 400, 10, 5
MODEL = """\
import pathlib
import time

import torch

HERE = pathlib.Path(__file__).parent


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        time.sleep(float((HERE / "pause").read_text()))
        return torch.stack([x.mean(1) * self.scale, x[:, 1]], 1)
"""


@pytest.fixture(scope="module")
def running() -> Iterator[list[Cluster]]:
    """The cluster of this module, once it is needed; a test may kill it."""
    started: list[Cluster] = []
    yield started
    for cluster in started:
        if cluster.alive:
            cluster.kill()


@pytest.fixture(scope="module")
def node_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder that programs on the cluster choose."""
    return tmp_path_factory.mktemp("node") / "home"


@pytest.fixture
def cluster(running: list[Cluster], node_home: Path) -> Cluster:
    if not running or not running[-1].alive:
        running.append(Cluster(cpus=2, home=node_home))
    return running[-1]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Input and model."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(RECORDS, 6)).astype(np.float32))
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "pause").write_text("0")
    return tmp_path


def spec_of(base: Path, name: str) -> Path:
    value: dict[str, Any] = {
        "version": 1,
        "name": name,
        "kind": "score",
        "model": {"source": "python:model.py:Slow"},
        "input": {"source": "x.npy", "format": "npy", "batch_size": BATCH},
        "schedule": {"on_miss": "eager"},
        "output": {"path": name, "format": "npy", "fields": ["id", "logits"], "shard_size": SHARD},
        "run": {"gpus": 2, "retry": {"initial": 0.05, "backoff": "constant"}},
    }
    path = base / f"{name}.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "manifest.json"}


def by_run(base: Path) -> dict[str, bytes]:
    """What `nimble-jobs run` publishes."""
    words = ["--home", str(base / "other"), "run", str(spec_of(base, "alone")), "--allow-python", str(base)]
    done = prefork.run([sys.executable, COMMAND, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return files(base / "alone")


@contextmanager
def workers(store: Store, base: Path, cluster: Cluster, devices: str) -> Iterator[subprocess.Popen[str]]:
    """The command under test, once each of its workers can run jobs. It is gone at the end."""
    log = base / f"ray-{devices}.log"
    words = ["worker", "start", "--ray", cluster.address, "--devices", devices]
    with log.open("w") as file:
        process = prefork.start([sys.executable, COMMAND, "--home", str(store.home), *words], stderr=file, text=True)
    try:
        count = len(devices.split(","))
        until(lambda: ready(store) == count or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.wait()
        print(log.read_text())  # seen where a test fails


def ready(store: Store) -> int:
    return len([worker for worker in store.workers.live("worker") if worker.status == "ready"])


def done(store: Store, job: Job, records: int) -> bool:
    return (store.jobs.get(job.id).records_done or 0) >= records


def submitted(store: Store, base: Path, name: str) -> Job:
    return client.submit(spec_of(base, name), store=store, allow_python=[base])


def test_more_gpus_than_the_cluster_has(store: Store, base: Path, cluster: Cluster) -> None:
    """The command says what the cluster has, and exits with 2."""
    words = ["worker", "start", "--ray", cluster.address, "--gpus", "2"]
    command = [sys.executable, COMMAND, "--home", str(store.home), *words]
    refused = prefork.run(command, capture_output=True, text=True, timeout=120)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "nimble-jobs: --gpus: found 2; expected at most 0 GPUs, as the Ray cluster has\n"


def test_a_node_with_other_versions(store: Store, cluster: Cluster) -> None:
    """Nothing runs at all, since no actor of the command could be used."""
    order = order_of(store.home, address=cluster.address, cpus=2)
    with pytest.raises(UsageError, match=r"node .*: found nimble_jobs .*, expected 9\.9; all nodes need the versions"):
        run(store.home, replace(order, versions=replace(order.versions, nimble_jobs="9.9")))
    assert list((store.home / "logs").glob("worker-*")) == []


def test_the_pipeline_of_the_guide_equals_its_model(base: Path, cluster: Cluster, node_home: Path) -> None:
    """Within the tolerance by which schedules are checked; the last batch is a partial one. The schedule is stored."""
    ((_, program),) = [part for part in parts_of(GUIDE) if part[0] == "pipeline.py"]
    (base / "pipeline.py").write_text(program)
    done = prefork.run(
        [sys.executable, str(base / "pipeline.py")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=base,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )
    assert done.returncode == 0, done.stderr
    with open_store(node_home) as store:
        assert len(store.schedules.list()) == 1
    made = pq.read_table(base / "scored", columns=["id", "output"]).sort_by("id")
    assert made["id"].to_pylist() == list(range(300))
    records = np.random.default_rng(0).random((300, 8), dtype=np.float32)
    with torch.no_grad():
        expected = runpy.run_path(str(base / "pipeline.py"))["load_model"]().eval()(torch.tensor(records))
    assert relative_norm(torch.tensor(made["output"].to_pylist()), expected) <= TOLERANCE["fp32"]


def test_jobs_outlive_actors_drains_and_the_cluster(store: Store, base: Path, cluster: Cluster) -> None:
    """Two actors score a job, one of them is killed in the middle, and Ray starts it again. Then SIGTERM puts a job
    back, and the next actor's cluster vanishes in its middle: an ordinary worker goes on. Outputs equal `run`'s.
    """
    expected = by_run(base)
    (base / "pause").write_text("0.1")
    with workers(store, base, cluster, "cpu,cpu") as command:
        first = submitted(store, base, "first")
        until(lambda: len([m for m in store.shards.members(first.id) if m.records_done >= SHARD]) == 2)
        actors = {process.pid for process in cluster.actors()}
        assert len(actors) == 2
        os.kill(min(actors), signal.SIGKILL)
        until(lambda: store.jobs.get(first.id).state.final)
        job = store.jobs.get(first.id)
        assert job.state is JobState.SUCCEEDED, job.error
        assert files(base / "first") == expected
        until(lambda: ready(store) == 2)
        assert len({process.pid for process in cluster.actors()} - actors) == 1

        (base / "pause").write_text("0.4")  # so that it cannot end before it is interrupted
        second = submitted(store, base, "second")
        until(lambda: done(store, second, 2 * SHARD))
        command.terminate()
        assert command.wait(timeout=PATIENCE_S) == 0
    assert store.jobs.get(second.id).state is JobState.QUEUED
    assert [attempt.outcome for attempt in store.jobs.attempts(second.id)] == ["requeued"]
    assert store.workers.live() == []
    before = store.jobs.get(second.id).records_done or 0

    with workers(store, base, cluster, "cpu"):
        until(lambda: done(store, second, before + 2 * SHARD))
        cluster.kill()
        until(lambda: store.workers.live() == [])
        assert not store.jobs.get(second.id).state.final
        (base / "pause").write_text("0")
        words = ["-m", "nimble_jobs.worker", "--home", str(store.home), "--device", "cpu", "--max-idle-s", "0.2"]
        prefork.run([sys.executable, *words], check=True, capture_output=True, timeout=120)
    assert store.jobs.get(second.id).state is JobState.SUCCEEDED
    assert [a.outcome for a in store.jobs.attempts(second.id)] == ["requeued", "lost", "succeeded"]
    assert files(base / "second") == expected
