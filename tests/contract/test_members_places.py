"""A worker joins a job of another machine only if it sees where the job's members stage its output."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nimble_jobs.data.hidden import staging_root
from nimble_jobs.job import Job
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.charge import Charge
from tests import postgres
from tests.store_samples import queued

SHARDS = [(0, 10), (10, 20)]


class Child:
    """A child process that notes what it is given."""

    device = "cpu"

    def __init__(self) -> None:
        self.given: list[Job] = []

    def moved(self) -> bool:
        return False

    def run(self, job: Job) -> None:
        self.given.append(job)


def begun(store: Store, name: str, path: str) -> Job:
    """A job that worker `a` has claimed and opened."""
    queued(store, spec={"version": 1, "run": {"gpus": 3}, "output": {"path": path}}, name=name, kind="score", now=0.0)
    job = store.jobs.claim("a", device="cpu", now=time.time())
    assert job is not None
    store.shards.open(job, "cpu", SHARDS, (), bad=0, now=time.time())
    return job


def test_a_worker_joins_what_it_sees(tmp_path: Path) -> None:
    """It passes over a job whose folder it does not see, says so once, and takes the next one; later it may see it.
    An object store is seen from everywhere.
    """
    with postgres.schema() as url, open_store(resolve(str(tmp_path / "home")), url) as store:
        elsewhere = begun(store, "elsewhere", str(tmp_path / "out"))
        child: Any = Child()
        assert not Charge(store, "b").take(child, 0.0)
        charge = Charge(store, "c")
        assert not charge.take(child, 0.0)
        remote = begun(store, "remote", "s3://bucket/out")
        assert charge.take(child, 0.0)
        assert not charge.take(child, 0.0)
        staged = staging_root(tmp_path / "out", elsewhere.id)
        (staged / "attempt-2").mkdir(parents=True)  # what another attempt left here
        assert not charge.take(child, 0.0)
        (staged / "attempt-1").mkdir()
        assert charge.take(child, 0.0)
        assert [(job.id, job.joined, job.worker) for job in child.given] == [
            (remote.id, True, "c"),
            (elsewhere.id, True, "c"),
        ]
        store.jobs.event("flush", "", now=time.time())  # with it goes what was to be written soon
        said = [event.message for event in store.jobs.events() if "does not join" in event.message]
        assert len(said) == 2
        assert f"does not join: {tmp_path} is not the folder there that the job's other devices write to" in said[0]
