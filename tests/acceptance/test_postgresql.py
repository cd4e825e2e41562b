"""Workers of two state folders over one PostgreSQL database: the database is away for longer than a lease, and a worker
is stopped for longer than that.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import pytest
from sqlalchemy import make_url, text

from nimble_jobs import client
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import postgres, prefork, zygote
from tests.waiting import PATIENCE_S, until

LEASE_S = 20.0  # so long that a busy machine does not miss to renew it; `pass_time` ends it earlier
RECORDS = np.arange(400, dtype=np.float32).reshape(200, 2)
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


def worker(home: Path, *options: str, log: int | IO[bytes] = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(home), "--device", "cpu", *options]
    return prefork.start(command, stdout=subprocess.DEVNULL, stderr=log)


def child_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    (child,) = zygote.spawned(process.pid)
    return child


def ids(store: Store) -> set[str]:
    return {info.id for info in store.workers.live("worker")}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The spec of a job that waits in its eleventh shard until there is a file `go`. Leases are short."""
    monkeypatch.setenv("NIMBLE_JOBS_LEASE_S", str(LEASE_S))
    monkeypatch.setenv("NIMBLE_JOBS_EAGER", "candidate")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC)
    np.save(tmp_path / "x.npy", RECORDS)
    return tmp_path / "job.yaml"


@pytest.fixture
def url() -> Iterator[str]:
    with postgres.schema() as url:
        yield url


@pytest.fixture
def started(url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers, which must end well when they are asked to, while the database at `url` is still there."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    for process in processes:
        assert process.wait(PATIENCE_S) == 0


def pass_time(store: Store, worker: str = "%") -> None:
    """All leases of the database have ended, or that of a worker."""
    change = text(f"UPDATE workers SET lease_until = lease_until - {LEASE_S} WHERE id LIKE :worker")
    store._database.write(lambda session: session.execute(change, {"worker": worker}))


def check_output(folder: Path) -> None:
    """The published scores are those of all records, and nothing else was left."""
    shards = [np.load(path) for path in sorted((folder / "out").glob("*.npy"))]
    assert np.array_equal(np.concatenate(shards), RECORDS.sum(1, keepdims=True))
    assert not [path for path in folder.iterdir() if path.name.startswith(".out")]


def test_a_worker_is_stopped_past_its_lease(
    url: str, job: Path, started: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of the other folder takes the job over and goes on from the last shard, and the child of the stopped
    one ends by itself. The stopped one, continued, writes nothing and becomes another worker.
    """
    monkeypatch.setenv("NIMBLE_JOBS_DB", url)
    one, other = (resolve(str(tmp_path / name)) for name in ("one", "other"))
    with open_store(one) as store:
        slow = client.submit(job, store=store, allow_python=[tmp_path])
        started.append(stopped := worker(other))
        until(lambda: store.jobs.get(slow.id).records_done >= 8)
        (first,) = ids(store)
        child = child_of(stopped)
        stopped.send_signal(signal.SIGSTOP)
        pass_time(store)
        started.append(worker(one))
        until(lambda: child.status() == psutil.STATUS_ZOMBIE)
        (tmp_path / "go").touch()
        client.wait([slow.id], store=store, timeout_s=PATIENCE_S)
        before = store.jobs.events(slow.id)
        stopped.send_signal(signal.SIGCONT)
        until(lambda: len(ids(store)) == 2)
        assert first not in ids(store)
        assert store.jobs.events(slow.id) == before
        ended = store.jobs.get(slow.id)
        assert (ended.state, ended.attempt, ended.records_done) == (JobState.SUCCEEDED, 2, 200)
        assert [attempt.outcome for attempt in store.jobs.attempts(slow.id)] == ["lost", "succeeded"]
        assert store.check() == []
    check_output(tmp_path)


def test_the_database_is_away_for_longer_than_a_lease(
    url: str, job: Path, started: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervisor and child wait for it. Then the lease is renewed, and they go on with the same attempt."""
    cut = tmp_path / "cut"
    place = Path(str(make_url(url).query["host"]))
    cut.symlink_to(place)
    with open_store(resolve(str(tmp_path / "one")), url) as store:
        slow = client.submit(job, store=store, allow_python=[tmp_path])
        monkeypatch.setenv("NIMBLE_JOBS_DB", url.replace(str(place), str(cut)) + "&application_name=cut-off")
        started.append(process := worker(store.home))
        until(lambda: store.jobs.get(slow.id).records_done >= 8)
        (first,) = ids(store)
        child = child_of(process)
        cut.unlink()
        end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'cut-off'"
        assert store._database.read(lambda session: session.execute(text(end)).scalar())
        pass_time(store)
        assert not store.workers.alive(first)
        cut.symlink_to(place)
        until(lambda: store.workers.alive(first))
        (tmp_path / "go").touch()
        (ended,) = client.wait([slow.id], store=store, timeout_s=PATIENCE_S)
        assert (ended.state, ended.attempt, ended.worker) == (JobState.SUCCEEDED, 1, first)
        assert child.is_running()
        assert child.status() != psutil.STATUS_ZOMBIE
        assert store.check() == []
    check_output(tmp_path)


@pytest.mark.parametrize("leads", [True, False])
def test_a_member_of_another_folder_is_killed(
    url: str,
    job: Path,
    started: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    leads: bool,
) -> None:
    """Two folders' workers share a job. When one dies with its supervisor, the other one goes on once the lease has
    ended, in the same attempt, also if it was the one that led.
    """
    monkeypatch.setenv("NIMBLE_JOBS_DB", url)
    job.write_text(job.read_text().replace("run: {", "run: {gpus: 2, "))
    homes = [resolve(str(tmp_path / name)) for name in ("one", "other")]
    with open_store(homes[0]) as store:
        slow = client.submit(job, store=store, allow_python=[tmp_path])
        workers = {}
        for home in homes:
            before = ids(store)
            started.append(worker(home))
            until(lambda before=before: ids(store) - before)
            (new,) = ids(store) - before
            workers[new] = started[-1]
        until(lambda: len(store.shards.members(slow.id)) == 2 and store.jobs.get(slow.id).records_done >= 8)
        leader = str(store.jobs.get(slow.id).worker)
        (killed,) = [name for name in workers if (name == leader) is leads]
        child = child_of(workers[killed])
        workers[killed].kill()
        workers[killed].wait()
        started.remove(workers[killed])
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        pass_time(store, killed)
        until(lambda: killed not in {m.worker for m in store.shards.members(slow.id) if m.left_at is None})
        (tmp_path / "go").touch()
        (ended,) = client.wait([slow.id], store=store, timeout_s=PATIENCE_S)
        said = [event.message for event in store.jobs.events(slow.id)]
        assert (ended.state, ended.attempt, ended.records_done) == (JobState.SUCCEEDED, 1, 200), said
        assert ended.worker != killed
        assert sum(member.records_done for member in store.shards.members(slow.id)) == 200
        assert store.check() == []
    check_output(tmp_path)


@pytest.mark.parametrize("way", ["refused", "silent"])
def test_an_idle_worker_leaves_a_server_that_vanished(
    url: str, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """After `--max-idle` without it, with an exit code and a message that say so, but not before its job has ended."""
    cut, log, place = tmp_path / "cut", tmp_path / "worker.log", Path(str(make_url(url).query["host"]))
    cut.symlink_to(place)
    cut_off = url.replace(str(place), str(cut)) + "&application_name=cut-off&connect_timeout=2"
    with open_store(resolve(str(tmp_path / "one")), url) as store, ExitStack() as held:
        slow = client.submit(job, store=store, allow_python=[tmp_path])
        monkeypatch.setenv("NIMBLE_JOBS_DB", cut_off)
        process = worker(store.home, "--max-idle-s", "2", log=held.enter_context(log.open("wb")))
        until(lambda: store.jobs.get(slow.id).records_done >= 8)
        cut.unlink()
        if way == "silent":  # it takes connections, and says nothing
            cut.mkdir()
            listener = held.enter_context(socket.socket(socket.AF_UNIX))
            (name,) = (path.name for path in place.glob(".s.PGSQL.*") if path.suffix != ".lock")
            listener.bind(str(cut / name))
            listener.listen(100)
        end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'cut-off'"
        store._database.read(lambda session: session.execute(text(end)).scalar())
        until(lambda: "waiting until this works again" in log.read_text())
        time.sleep(3.0)
        assert process.poll() is None  # it has a job
        child_of(process).kill()
        assert process.wait(PATIENCE_S) == 1
        told = log.read_text()
        assert "no work for 2s (--max-idle), because the store cannot be used; the worker ends: " in told
        assert "Traceback" not in told
