"""The simulation's store does what the real one does: equal operations leave equal rows and give equal answers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from nimble_jobs.job import Job
from nimble_jobs.store import Left, Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.shard_tables import ShardRow
from nimble_jobs.workloads.stragglers import worth_a_copy
from tests.scripts import load
from tests.store_samples import NOW, queued

SHARDS, RECORDS, STEPS = 40, 10, 120
WORKERS = ("a", "b", "c", "d")


class Both:
    """The real store and the simulated one, side by side."""

    def __init__(self, store: Store, rng: random.Random, tolerated: int) -> None:
        self.store, self.rng, self.now = store, rng, NOW
        spec = {"version": 1, "run": {"gpus": 4, "max_failed_shards": tolerated}}
        queued(store, spec=spec, name="n", kind="score", now=NOW)
        job = store.jobs.claim("a", device="cuda:0", now=NOW)
        assert job is not None
        bounds = [(n * RECORDS, (n + 1) * RECORDS) for n in range(SHARDS)]
        store.shards.open(job, "cuda:0", bounds, (), bad=0, now=NOW)
        self.simulated = load("simulated_store").SimulatedStore(
            SHARDS, RECORDS, max_attempts=job.max_attempts, tolerated=tolerated
        )
        self.simulated.join("a", "cuda:0", NOW)
        self.jobs: dict[str, Job] = {"a": job}  # of active members

    def step(self) -> bool:
        """One operation, drawn at random. False once the attempt is over."""
        self.now += self.rng.uniform(0.1, 2.0)
        worker = self.rng.choice(WORKERS)
        if worker not in self.jobs:
            self._join(worker)
            return True
        job = self.jobs[worker]
        match self.rng.choice(["claim", "claim", "finish", "finish", "finish", "copy", "release", "leave"]):
            case "claim":
                alone = not self.simulated.entries[worker].holds
                found = self.store.shards.claim(job, self.now, idle=alone)
                expected = self.simulated.claim(worker, len(self.jobs), self.now, idle=alone)
                assert [claim.index for claim in found] == expected
            case "finish":
                index = self.rng.choice(sorted(self.simulated.running) or [0])  # also what others hold
                self.store.shards.finish(job, index, 0, self.now)
                self.simulated.finish(worker, index, self.now)
            case "copy":
                self._copy(worker, job)
            case "release":
                self.store.shards.release(job)
                self.simulated.release(worker)
            case "leave":
                return self._leave(worker)
        return True

    def _join(self, worker: str) -> None:
        job = self.store.shards.join(worker, "cuda:1", self.now)
        assert (job is None) == (self.simulated.open == 0 or self._barred(worker))
        if job is not None:
            self.jobs[worker] = job
            self.simulated.join(worker, "cuda:1", self.now)

    def _barred(self, worker: str) -> bool:
        entry = self.simulated.entries.get(worker)
        return entry is not None and entry.failures >= self.simulated.max_attempts

    def _copy(self, worker: str, job: Job) -> None:
        mine = replace(job, worker=worker)
        real = self.store.shards.in_flight(mine), self.store.shards.members(job.id)
        simulated = self.simulated.in_flight(), self.simulated.members()
        chosen = worth_a_copy(*real, worker, self.now)
        assert chosen == worth_a_copy(*simulated, worker, self.now)
        index = self.rng.randrange(SHARDS) if chosen is None else chosen
        alone = not self.simulated.entries[worker].holds
        taken = self.store.shards.second(mine, index, self.now, idle=alone) is not None
        assert taken == self.simulated.second(worker, index, self.now, idle=alone)

    def _leave(self, worker: str) -> bool:
        error = self.rng.choice([None, "odd"])
        left = self.store.shards.leave(self.jobs.pop(worker), now=self.now, error=error)
        assert left is self.simulated.leave(worker, self.now, failed=error is not None)
        return left is Left.NOTHING

    def compare(self, job: Job) -> None:
        """All rows."""
        columns = (ShardRow.index, ShardRow.state, ShardRow.failures, ShardRow.worker, ShardRow.second)
        query = select(*columns).where(ShardRow.job == job.id).order_by(ShardRow.index)
        rows = self.store._database.read(lambda session: session.execute(query).all())
        states = load("simulated_store").STATES
        for index, state, failures, worker, second in rows:
            simulated = self.simulated
            assert (state, failures) == (states[simulated.state[index]], simulated.failures.get(index, 0))
            if state == "running":
                holder = simulated.running[index]
                assert (worker, second) == (holder.worker, holder.second)
        known: list[Any] = [
            (m.worker, m.records_done, m.busy_s, m.moved_at, m.failures, m.left_at)
            for m in self.store.shards.members(job.id)
        ]
        assert known == [
            (m.worker, m.records_done, pytest.approx(m.busy_s), m.moved_at, m.failures, m.left_at)
            for m in self.simulated.members()
        ]
        assert self.store.jobs.get(job.id).worker == self.simulated.lead
        assert self.store.shards.unfinished(job) == self.simulated.unfinished()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_stores_do_the_same(tmp_path: Path, url: str | None, seed: int) -> None:
    """Claims, copies, finished shards, failures, and members that come and go, in an order drawn at random."""
    rng = random.Random(seed)
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        both = Both(store, rng, tolerated=seed)
        job = both.jobs["a"]
        for step in range(STEPS):
            going_on = both.step()
            if not going_on:
                break
            if step % 10 == 0:
                both.compare(job)
        assert step > 10
