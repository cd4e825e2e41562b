"""A database or state folder replaced, moved or deleted under a worker; it goes on, or leaves and says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from faults import environment
from several_devices import stop
from worker_fakes import submit
from worker_processes import Start, ended, noted

from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import DATABASE, MARKER, resolve
from tests import prefork
from tests.waiting import PATIENCE_S, until


@contextmanager
def quiet(home: Path) -> Iterator[None]:
    """Nobody writes to the database inside the block."""
    with closing(sqlite3.connect(home / DATABASE, isolation_level=None, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def replace_database(home: Path) -> None:
    """Put a copy of the database, of this moment, in its place, as a restored backup would be."""
    with quiet(home):
        copy = home / "copy.db"
        shutil.copy2(home / DATABASE, copy)
        copy.replace(home / DATABASE)


def running(store: Store, job: Job) -> None:
    until(lambda: store.jobs.get(job.id).phase == "run")


def cli(home: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(home), *arguments]
    run = prefork.run if env is None else subprocess.run  # another PYTHONPATH needs a process of its own
    return run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=env)


def let_pass(home: Path, seconds: float) -> None:
    """The worker, which is stopped, gave its last sign so much longer ago."""
    (file,) = (home / "workers").glob("*.json")
    info = json.loads(file.read_text())
    file.write_text(json.dumps(info | {"seen_at": info["seen_at"] - seconds}))


def log_of(tmp_path: Path, number: int = 0) -> str:
    return (tmp_path / f"worker-{number}.log").read_text()


def test_a_replaced_database_is_opened_anew(store: Store, start: Start, tmp_path: Path) -> None:
    """An idle worker and one with a job hear of what is submitted to the restored copy; nothing runs twice."""
    first = submit(store, tmp_path, do="batches")
    worker = start()
    ended(store, first)
    replace_database(store.home)
    job = submit(store, tmp_path, name="busy", do="batches", gate=str(tmp_path / "gate"))
    running(store, job)
    replace_database(store.home)
    (tmp_path / "gate").touch()
    last = submit(store, tmp_path, name="last", do="batches")
    done = ended(store, job, last)
    assert [j.state for j in done] == [JobState.SUCCEEDED] * 2
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["succeeded"]
    assert worker.poll() is None
    assert "the file was replaced; the new one is used" in log_of(tmp_path)
    assert store.check() == []


@pytest.mark.parametrize("what", ["database", "folder"])
def test_what_is_moved_away_and_back(store: Store, start: Start, tmp_path: Path, what: str) -> None:
    """While the database or its folder is away a job runs on; its end is written when it is back."""
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    worker = start()
    running(store, job)
    place = store.home / DATABASE if what == "database" else store.home
    away = tmp_path / "away"
    with quiet(store.home):
        place.rename(away)
    (tmp_path / "gate").touch()
    until(lambda: "is gone" in log_of(tmp_path) and len(noted(tmp_path)) == 2)  # and the job has done its work
    assert worker.poll() is None
    assert not place.exists()  # nobody made an empty one
    away.rename(place)
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED
    assert done.attempt == 1
    assert "is gone" in log_of(tmp_path)


def test_another_folder_in_its_place(store: Store, start: Start, tmp_path: Path) -> None:
    """A worker whose folder became another one leaves and names both; the job is found where the old folder is now."""
    home, old = store.home, tmp_path / "old"
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    worker = start()
    running(store, job)
    identity = json.loads((home / MARKER).read_text())["id"]
    with quiet(home):
        home.rename(old)
    open_store(resolve(str(home))).close()
    assert worker.wait(timeout=PATIENCE_S) == 1
    assert f"was {identity}" in log_of(tmp_path)
    with open_store(resolve(str(old))) as moved:
        assert moved.jobs.get(job.id).state is JobState.RUNNING
        assert [j.id for j in moved.recover(time.time())] == [job.id]
        assert moved.jobs.get(job.id).state is JobState.QUEUED


def test_a_restored_folder(store: Store, start: Start, tmp_path: Path) -> None:
    """A copy of the whole folder in its place has other lock files: the worker takes one there and runs its jobs."""
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    worker = start()
    running(store, job)
    copy = tmp_path / "copy"
    with quiet(store.home):
        shutil.copytree(store.home, copy)
        store.home.rename(tmp_path / "old")
        copy.rename(store.home)
    (tmp_path / "gate").touch()
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED
    assert worker.poll() is None
    (live,) = until(store.workers.live)  # it may be between its old lock and the new one
    assert live.pid == worker.pid
    last = submit(store, tmp_path, name="last", do="batches")
    assert ended(store, last)[0].state is JobState.SUCCEEDED
    assert store.check() == []


def test_a_deleted_folder(store: Store, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose folder does not come back leaves with an error; it makes no empty one in its place."""
    monkeypatch.setenv("FAKES_GONE_S", "3")
    worker = start()
    until(lambda: any(info.status == "ready" for info in store.workers.live()))
    shutil.rmtree(store.home)
    assert worker.wait(timeout=PATIENCE_S) == 1
    assert "is gone" in log_of(tmp_path)
    assert not store.home.exists()


def test_jobs_that_a_restored_database_does_not_know(store: Store, start: Start, tmp_path: Path) -> None:
    """An older copy comes back: the attempt that it knows nothing of is dropped, and the job runs anew."""
    (tmp_path / "older").mkdir()
    submit_first = submit(store, tmp_path, name="first", do="batches")
    with quiet(store.home):
        shutil.copy2(store.home / DATABASE, tmp_path / "older.db")
    unknown = submit(store, tmp_path, name="unknown", do="batches", count=2, gate=str(tmp_path / "gate"))
    worker = start()
    running(store, unknown)
    with quiet(store.home):
        (tmp_path / "older.db").replace(store.home / DATABASE)
    (done,) = ended(store, submit_first)
    assert done.state is JobState.SUCCEEDED
    assert worker.poll() is None
    assert "no longer" in log_of(tmp_path)


def test_others_see_a_stuck_worker(store: Store, start: Start) -> None:
    """`worker ls` and `doctor` name a worker that gives no sign, and for how long; they are content once it goes on."""
    worker = start()
    until(lambda: any(info.status == "ready" for info in store.workers.live()))
    (row,) = json.loads(cli(store.home, "worker", "ls", "--json").stdout)
    assert (row["health"], row["status"]) == (None, "ready")
    stop(store, psutil.Process(worker.pid))
    try:
        let_pass(store.home, 22)
        found = cli(store.home, "worker", "ls")
        assert "stuck" in found.stdout
        assert re.search(r"has given no sign of life for \d+ ?s", found.stderr)
        (row,) = json.loads(cli(store.home, "worker", "ls", "--json").stdout)
        assert row["health"] == "stuck"
        assert row["seen_s"] > 20
        doctor = cli(store.home, "doctor", "--no-device")
        assert doctor.returncode == 100
        assert f"problem\tworker\tworker {row['id']} (process {worker.pid}) has given no sign" in doctor.stdout
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    until(lambda: cli(store.home, "doctor", "--no-device").returncode == 0)


def test_others_see_a_deaf_worker(store: Store, tmp_path: Path) -> None:
    """A live worker on another inode of the database is named by `worker ls` and `doctor`."""
    with store.workers.hold({"role": "worker", "status": "ready", "seen_at": time.monotonic()}) as lease:
        lease.update(database=store.database_file)
        assert cli(store.home, "doctor", "--no-device").returncode == 0
        replace_database(store.home)
        lease.update(seen_at=time.monotonic())
        assert "deaf" not in cli(store.home, "worker", "ls").stdout  # it may yet notice
        (tmp_path / "clock").write_text("16")
        later = environment(tmp_path)
        assert "deaf" in cli(store.home, "worker", "ls", env=later).stdout
        doctor = cli(store.home, "doctor", "--no-device", env=later)
        assert doctor.returncode == 100
        assert f"still uses the old file of {store.home / DATABASE}" in doctor.stdout
