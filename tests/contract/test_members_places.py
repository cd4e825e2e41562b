"""A worker joins a job only if it would write the same numbers, to the place that the job's members write to."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from nimble_jobs.data.hidden import staging_root
from nimble_jobs.errors import StoreError
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

    def __init__(self, **software: str) -> None:
        self.software, self.most_ranks = software, 1
        self.given: list[Job] = []

    def moved(self) -> bool:
        return False

    def run(self, job: Job) -> None:
        self.given.append(job)


def begun(store: Store, name: str, path: str, software: dict[str, str] | None = None) -> Job:
    """A job that worker `a` has claimed and opened."""
    queued(store, spec={"version": 1, "run": {"gpus": 3}, "output": {"path": path}}, name=name, kind="score", now=0.0)
    job = store.jobs.claim("a", device="cpu", now=time.time())
    assert job is not None
    store.shards.open(job, "cpu", SHARDS, (), bad=0, now=time.time(), software=software or {})
    return job


def test_a_worker_joins_what_it_sees(tmp_path: Path) -> None:
    """It passes over a job whose folder it does not see, says so once, and takes the next one; later it may see it.
    An object store is seen from everywhere.
    """
    with postgres.schema() as url, open_store(resolve(str(tmp_path / "home")), url) as store:
        begun(store, "unreadable", str(tmp_path / ("n" * 255)))  # the file system here refuses even to look
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
        assert len(said) == 4  # of each of both, once by each worker
        assert f"does not join: {tmp_path} is not the folder there that the job's other devices write to" in said[0]


def test_a_worker_with_other_versions_stays_apart(tmp_path: Path, url: str | None) -> None:
    """It says why, once in an event and as long as that is so to `worker ls`. One with the same versions joins."""
    versions = {"torch": "2.9.1", "nimble-jobs": "1.0"}
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        job = begun(store, "n", "s3://bucket/out", versions)
        other: Any = Child(**(versions | {"torch": "2.8.0"}))
        charge = Charge(store, "b")
        assert not charge.take(other, 0.0)
        assert not charge.take(other, 0.0)
        assert charge.apart == {job.id: "torch 2.8.0, expected 2.9.1, as on the job's other devices"}
        store.jobs.event("flush", "", now=time.time())  # with it goes what was to be written soon
        said = [event.message for event in store.jobs.events(job.id) if "does not join" in event.message]
        assert len(said) == 1
        assert said[0].endswith("does not join: torch 2.8.0, expected 2.9.1, as on the job's other devices")
        older: Any = Child(torch="2.9.1")  # tells less about itself, as an earlier version does
        assert not Charge(store, "c").take(older, 0.0)
        same: Any = Child(**versions)
        assert Charge(store, "d").take(same, 0.0)
        assert [member.software for member in store.shards.members(job.id)] == [versions, versions]
        store.shards.leave(same.given[0], now=time.time())
        store.jobs.requeue(job.id, job.attempt, reason="stopped", now=time.time())
        assert charge.take(other, 0.0)  # now it claims the job itself
        assert charge.apart == {}


def test_a_later_attempt_says_that_versions_have_changed(tmp_path: Path, url: str | None) -> None:
    """Finished shards stay, and an event names what they were made with."""
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        job = begun(store, "n", "s3://bucket/out", {"torch": "2.8.0"})
        again = replace(job, attempt=job.attempt + 1)
        store.jobs.requeue(job.id, job.attempt, reason="stopped", now=time.time())
        assert store.jobs.claim("b", device="cpu", now=time.time()) is not None
        store.shards.open(again, "cpu", SHARDS, {0}, bad=0, now=time.time(), software={"torch": "2.9.1"})
        assert store.jobs.events(job.id)[-1].message == (
            "goes on from shards that an earlier attempt finished with other versions: torch 2.8.0, expected 2.9.1"
        )


def test_no_home_opens_a_database_of_another_version(tmp_path: Path) -> None:
    """Another program's home on the same PostgreSQL database is refused, and changes nothing there."""
    with postgres.schema() as url, open_store(resolve(str(tmp_path / "one")), url) as store:
        store._database.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = '9999'")))
        with pytest.raises(StoreError, match=r"newer nimble-jobs .database version 9999"):
            open_store(resolve(str(tmp_path / "two")), url)
