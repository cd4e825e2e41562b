"""What a job costs that finds its model resident: SQL statements, commits and syncs, which no busy machine changes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from nimble_jobs import spec as specs
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import Station, execute, real_station
from nimble_jobs.worker.pulse import Pulse
from tests.store_samples import queued

# By their first table. A claim first asks whether a running job wants this device.
CLAIM = ["SELECT jobs", "UPDATE jobs", "INSERT attempts", "INSERT events"]
LOOK_UP = ["SELECT schedules"]
SOON = ["INSERT events", "INSERT events", "UPDATE jobs"]
OWNED = ["SELECT attempts"]  # right before the output takes its place: a read, which commits nothing
COUNT = ["UPDATE schedules", "INSERT schedule_uses", "INSERT totals"]
END = [*SOON, "SELECT jobs", "UPDATE jobs", "UPDATE attempts", "INSERT events", "INSERT publications", *COUNT]


def submit(store: Store, folder: Path, name: str) -> None:
    """Queue a job that takes milliseconds and publishes three columns."""
    spec = {
        "version": 1,
        "name": name,
        "kind": "score",
        "model": {"source": f"python:{folder}/model.py:make"},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": 4},
        "schedule": {"progressive": False},
        "output": {"path": str(folder / name), "format": "npy", "fields": ["id", "top1", "probability"]},
    }
    resolved = specs.dump(specs.restore(spec))
    queued(store, spec=resolved, name=name, kind="score", allow_python=[str(folder)], now=time.time())


def work(store: Store, station: Station) -> str:
    """Claim the next job and run it, as a worker and its child do. Returns its id."""
    assert store.shards.join("w", "cpu", time.time()) is None
    job = store.jobs.claim("w", device="cpu", now=time.time(), expected=True)
    assert job is not None
    assert execute(job, station)
    return job.id


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """The statements and commits of SQL in this block, and what is synced, in their order."""
    statements, synced = list[str](), list[str]()
    sync = os.fsync

    def executed(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        words = statement.replace(" INTO ", " ").replace(" FROM ", " ").split()
        statements.append(f"{words[0]} {words[1].partition('.')[0]}")

    def commit(_connection: Any) -> None:
        statements.append("COMMIT")

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    listeners = (("before_cursor_execute", executed), ("commit", commit))
    for name, listener in listeners:
        event.listen(Engine, name, listener)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            yield statements, synced
    finally:
        for name, listener in listeners:
            event.remove(Engine, name, listener)


def test_a_resident_job_asks_for_no_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commits; each file and both folders synced once; nothing asked that another statement tells."""
    monkeypatch.setattr("nimble_jobs.worker.executor.Pulse", partial(Pulse, interval_s=600))  # beats would be counted
    (tmp_path / "model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    np.save(tmp_path / "x.npy", np.ones((4, 3), dtype=np.float32))
    with open_store(resolve(str(tmp_path / "home"))) as store:
        station = real_station(store, "w", "cpu", None)
        for name in ("miss", "first", "next"):
            submit(store, tmp_path, name)
        work(store, station)
        work(store, station)  # the first hit makes the row that counts them
        with counted(monkeypatch) as (statements, synced):
            scored = work(store, station)
        job = store.jobs.get(scored)
        station.close()
        assert (job.state, job.schedule["hit"]) == (JobState.SUCCEEDED, "resident")
    assert statements == [*CLAIM, "COMMIT", *LOOK_UP, *OWNED, *END, "COMMIT"]
    files = ["part-00000.id.npy", "part-00000.top1.npy", "part-00000.probability.npy", "manifest.json"]
    assert sorted(synced) == sorted([*files, "attempt-1", tmp_path.name])
