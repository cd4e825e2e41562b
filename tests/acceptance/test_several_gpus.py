"""One scoring job over several devices, with real worker processes on the CPU: its output equals one device's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_devices import child_of, ended, files, hold, pause, release, stop, under_way, worker

from nimble_jobs import client
from nimble_jobs import spec as specs
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store
from tests.store_samples import queued
from tests.waiting import PATIENCE_S, until

RECORDS, SHARD = 400, 10
MODEL = """\
import itertools
import os
import pathlib
import time

import torch

HERE = pathlib.Path(__file__).parent
SEEN = itertools.count(1)


def held(records, most):
    for _ in records:
        seen = next(SEEN)
    while seen > most and (HERE / "held").exists():
        time.sleep(0.01)


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        time.sleep(float((HERE / "pause").read_text()))
        held(x, 60)
        first = int(x[0, 0])
        for file in HERE.glob("do-*"):  # do-HOW-RECORD: once, by whoever has this record
            how, record = file.name.split("-")[1:]
            if first <= int(record) < first + len(x):
                if how != "always":
                    try:
                        file.unlink()
                    except FileNotFoundError:
                        continue
                if how == "kill":
                    os.kill(os.getpid(), 9)
                if how == "fault":
                    raise RuntimeError("CUDA error: device-side assert triggered")
                if how in ("raise", "always"):
                    raise ValueError(f"record {record} is odd")
        return torch.stack([x.mean(1) * self.scale, x[:, 1]], 1)
"""


def job_spec(base: Path, name: str, **run: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "name": name,
        "kind": "score",
        "model": {"source": f"python:{base}/model.py:Slow"},
        "input": {"source": str(base / "x.npy"), "format": "npy", "batch_size": 5},
        "schedule": {"on_miss": "eager"},
        "output": {"path": str(base / name), "format": "npy", "fields": ["id", "logits"], "shard_size": SHARD},
        "run": {"retry": {"initial": 0.05, "backoff": "constant"}, **run},
    }


def prepare(folder: Path) -> Path:
    """Input and model; the first column of a record is its position."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RECORDS, 6)).astype(np.float32)
    x[:, 0] = np.arange(RECORDS)
    np.save(folder / "x.npy", x)
    (folder / "model.py").write_text(MODEL)
    pause(folder, 0)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def submit(store: Store, base: Path, name: str, **run: Any) -> Job:
    spec = specs.dump(specs.restore(job_spec(base, name, **run)))
    return queued(store, spec=spec, name=name, kind="score", allow_python=[str(base)], now=time.time())


@pytest.fixture(scope="module")
def alone(running: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one device publishes."""
    base = prepare(tmp_path_factory.mktemp("alone"))
    done = ended(running, submit(running, base, "alone"))
    assert done.state is JobState.SUCCEEDED, done.error
    assert running.shards.members(done.id) == []
    return files(base / "alone")


def only_with_all(config: pytest.Config) -> None:
    """A case whose like is always tested."""
    if not config.getoption("--all"):
        pytest.skip("needs --all")


def test_two_devices_publish_what_one_publishes(running: Store, base: Path, alone: dict[str, bytes]) -> None:
    """Both take a part of the shards, and the output is equal byte for byte. Nothing is left beside it."""
    hold(base)
    job = submit(running, base, "both", gpus=2)
    under_way(running, job, 2 * SHARD)
    release(base)
    done = ended(running, job)
    assert done.state is JobState.SUCCEEDED, done.error
    assert files(base / "both") == alone
    members = running.shards.members(job.id)
    assert sum(member.records_done for member in members) == RECORDS
    assert len([member for member in members if member.records_done]) == 2
    assert (done.records_done, done.records_total, done.records_bad, done.attempt) == (RECORDS, RECORDS, 0, 1)
    assert [path.name for path in base.glob(".both*")] == []


@pytest.mark.parametrize("leads", [True, False])
def test_one_that_is_killed(
    store: Store, base: Path, alone: dict[str, bytes], leads: bool, pytestconfig: pytest.Config
) -> None:
    """The others take its shards over within the same attempt, also from the one that led the job."""
    if not leads:
        only_with_all(pytestconfig)
    hold(base)
    job = submit(store, base, "both", gpus="all")
    with worker(store, base, "cpu,cpu") as process:
        members = under_way(store, job, 2 * SHARD)
        lead = store.jobs.get(job.id).worker
        (victim,) = [m for m in members if (m.worker == lead) is leads]
        child_of(store, process, victim).kill()
        release(base)
        done = ended(store, job)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 1), done.error
    assert files(base / "both") == alone
    assert [m.failures for m in store.shards.members(job.id) if m.worker == victim.worker] == [1]
    assert (done.worker != lead) is leads
    assert [path.name for path in base.glob(".both*")] == []


@pytest.mark.parametrize("leads", [True, False])
def test_one_that_is_stopped(
    store: Store, base: Path, alone: dict[str, bytes], leads: bool, pytestconfig: pytest.Config
) -> None:
    """The other one makes copies of its shards. If it leads, its process is ended after run.stall."""
    if leads:
        only_with_all(pytestconfig)
    hold(base)
    job = submit(store, base, "both", gpus=2, stall="20s")
    with worker(store, base, "cpu,cpu") as process:
        members = under_way(store, job, 2 * SHARD)
        lead = store.jobs.get(job.id).worker
        (victim,) = [m for m in members if (m.worker == lead) is leads]
        stopped = child_of(store, process, victim)
        stop(store, stopped)
        release(base)
        done = ended(store, job)
        if not leads:
            stopped.kill()  # nobody has to wait for it
    assert done.state is JobState.SUCCEEDED, done.error
    assert files(base / "both") == alone


def test_one_whose_device_faults(store: Store, base: Path, alone: dict[str, bytes]) -> None:
    """Its process is replaced, its shards are scored again, and the attempt goes on."""
    pause(base, 0.01)
    (base / "do-fault-205").touch()
    job = submit(store, base, "both", gpus=2)
    with worker(store, base, "cpu,cpu"):
        done = ended(store, job)
    assert done.state is JobState.SUCCEEDED, done.error
    assert not (base / "do-fault-205").exists()
    assert files(base / "both") == alone


def test_a_model_that_raises(running: Store, base: Path) -> None:
    """The job fails at once with the error, whichever member met it, and nothing stays beside the output."""
    (base / "do-always-205").touch()
    job = submit(running, base, "both", gpus=2)
    done = ended(running, job)
    until(lambda: not list(base.glob(".both*")))
    assert (done.state, done.attempt) == (JobState.FAILED, 1)
    assert "record 205 is odd" in str(done.error)


def test_a_shard_that_fails_alone_on_the_only_device(
    store: Store, base: Path, alone: dict[str, bytes], pytestconfig: pytest.Config
) -> None:
    only_with_all(pytestconfig)
    with worker(store, base, "cpu"):
        check_a_shard_that_fails_alone(store, base, alone)


def test_a_shard_that_fails_alone(running: Store, base: Path, alone: dict[str, bytes]) -> None:
    check_a_shard_that_fails_alone(running, base, alone)


def check_a_shard_that_fails_alone(store: Store, base: Path, alone: dict[str, bytes]) -> None:
    """After three failures its records are bad records with the error, and all other shards are as ever."""
    (base / "do-always-205").touch()
    done = ended(store, submit(store, base, "both", gpus=2, max_failed_shards=1))
    assert done.state is JobState.SUCCEEDED, done.error
    assert (done.records_done, done.records_bad) == (RECORDS, SHARD)
    published = files(base / "both")
    errors = [json.loads(line) for line in published.pop("errors.jsonl").splitlines()]
    assert [error["index"] for error in errors] == list(range(200, 210))
    assert "record 205 is odd" in errors[0]["reason"]
    assert published == {name: data for name, data in alone.items() if not name.startswith("part-00020")}


def test_too_many_bad_records_of_all_members(running: Store, base: Path) -> None:
    """The threshold counts what all members found."""
    x = np.load(base / "x.npy")
    x[[13, 113, 213, 313], 1] = np.nan
    np.save(base / "x.npy", x)
    tolerant, strict = (submit(running, base, n, gpus=2, error_threshold=t) for n, t in (("ok", 0.01), ("no", 0.0075)))
    done, failed = ended(running, tolerant), ended(running, strict)
    assert (done.state, done.records_bad) == (JobState.SUCCEEDED, 4), done.error
    assert failed.state is JobState.FAILED
    assert "more than run.error_threshold 0.0075 allows" in str(failed.error)


def test_drain(store: Store, base: Path, alone: dict[str, bytes]) -> None:
    """SIGTERM gives the job back with all of its shards, and one device goes on."""
    hold(base)
    job = submit(store, base, "both", gpus=2)
    with worker(store, base, "cpu,cpu") as process:
        under_way(store, job, 2 * SHARD)
        process.terminate()
        pause(base, 0.5)  # so that the job has not ended before its members know
        release(base)
        assert process.wait(PATIENCE_S) == 0
    given_back = store.jobs.get(job.id)
    assert given_back.state is JobState.QUEUED
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["requeued"]
    pause(base, 0)
    with worker(store, base, "cpu"):
        done = ended(store, job)
    assert (done.state, done.records_done) == (JobState.SUCCEEDED, RECORDS), done.error
    assert files(base / "both") == alone


def test_cancel(running: Store, base: Path) -> None:
    """A cancelled job ends for all members."""
    hold(base)
    job = submit(running, base, "both", gpus=2)
    under_way(running, job, 2 * SHARD)
    client.cancel(job.id, store=running)
    pause(base, 0.5)  # so that the job has not ended before its members know
    release(base)
    assert ended(running, job).state is JobState.CANCELLED
    until(lambda: not list(base.glob(".both*")))


def test_a_killed_worker_beside_another_one(store: Store, base: Path, alone: dict[str, bytes]) -> None:
    """Members may belong to several workers. If the one that leads is killed as a whole, the others publish."""
    hold(base)
    job = submit(store, base, "both", gpus="all")
    with worker(store, base, "cpu") as first, worker(store, base, "cpu") as second:
        under_way(store, job, 2 * SHARD)
        lead = store.jobs.get(job.id).worker
        (pid,) = [info.pid for info in store.workers.live() if info.id == lead]
        (first if first.pid == pid else second).kill()
        until(lambda: store.jobs.get(job.id).worker != lead)
        release(base)
        done = ended(store, job)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 1), done.error
    assert files(base / "both") == alone
