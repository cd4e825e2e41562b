"""SIGKILL at random moments: every accepted job succeeds exactly once, with the output of an undisturbed run.

NIMBLE_JOBS_KILL_ROUNDS sets the number of rounds, three by default and twenty with --all;
NIMBLE_JOBS_KILL_SEED the random moments. With NIMBLE_JOBS_KILL_DATABASE=postgresql the workers have two state folders
over one database with short leases, and some are stopped for longer than their lease instead of killed.
docs/measurements/kill-rounds.md holds the results of many.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import postgres, prefork, zygote
from tests.seeds import seed
from tests.waiting import PATIENCE_S

ROUNDS = int(os.environ["NIMBLE_JOBS_KILL_ROUNDS"])
SEED = seed()
SHARED = os.environ.get("NIMBLE_JOBS_KILL_DATABASE") == "postgresql"
WORKERS = 4 if SHARED else 3  # some start anew while another runs jobs
LEASE_S = 6.0
GPUS = int(os.environ.get("NIMBLE_JOBS_KILL_GPUS", "1"))  # how many workers may share a job
VARIANTS = [(name, width) for width in (8, 12) for name in ("parquet", "jsonl", "npy")]  # output format, model width
MOMENTS = ("running", "build", "publish", "any")  # when a round kills; they take turns

MODEL = """
import torch

def small(width):
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))
"""
SPEC = """
version: 1
name: {name}
kind: score
model: {{source: "python:model.py:small", args: {{width: {width}}}}}
input: {{source: x.npy, format: npy, batch_size: 16}}
schedule: {{progressive: false}}
output: {{path: out/{name}, format: {format}, fields: [id, top1, logits], shard_size: 32}}
run: {{gpus: {gpus}, retry: {{max_attempts: 100, backoff: constant, initial: 50ms}}}}
"""


class Farm:
    """Workers that are killed and started again, and the jobs that they are given."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        self.homes = [store.home, resolve(str(folder / "other"))] if SHARED else [store.home]
        self.started = 0
        self.jobs: list[tuple[Job, tuple[str, int]]] = []
        self.log = (folder / "workers.log").open("a")
        self.workers = [self._worker()]
        np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(320, 8)).astype(np.float32))
        (folder / "model.py").write_text(MODEL)

    def submit(self, variant: tuple[str, int], *, priority: int = 0) -> Job:
        """Queue a job that scores 320 records in ten shards."""
        name = f"job-{len(self.jobs)}"
        path = self.folder / f"{name}.yaml"
        path.write_text(SPEC.format(name=name, format=variant[0], width=variant[1], gpus=GPUS))
        job = client.submit(path, store=self.store, allow_python=[self.folder], priority=priority)
        self.jobs.append((job, variant))
        return job

    def grow(self) -> None:
        """Start the other workers."""
        self.workers += [self._worker() for _ in range(WORKERS - 1)]

    def feed(self) -> None:
        """Keep a few jobs waiting."""
        waiting = sum(job.priority == 0 for job in self.store.jobs.list(states=[JobState.QUEUED]))
        for _ in range(max(0, 4 - waiting)):
            self.submit(VARIANTS[len(self.jobs) % len(VARIANTS)])

    def run(self, variants: Iterable[tuple[str, int]]) -> dict[tuple[str, int], dict[str, str]]:
        """The outputs of undisturbed jobs."""
        jobs = {variant: self.submit(variant) for variant in variants}
        client.wait([job.id for job in jobs.values()], store=self.store, timeout_s=300)
        return {variant: output_of(self.folder / "out" / job.name) for variant, job in jobs.items()}

    def aim(self, moment: str, rng: random.Random) -> int:
        """Wait for a moment of the given kind. Returns the number of the worker to kill.

        running: the worker runs a job, or did a moment ago. build: it runs a job whose schedule is not stored. publish:
        its job has written its manifest, or published, and has not ended. any: at any time, even while it starts.
        """
        if moment == "any":
            time.sleep(rng.uniform(0, 1.0))
            return rng.randrange(WORKERS)
        target = self._unbuilt() if moment == "build" else None
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self._running(target, publishing=moment == "publish")):
            assert time.monotonic() < deadline, f"no worker reached: {moment}"
            if target is None:
                self.feed()
            elif self.store.jobs.get(target).state.final:  # it ended between two looks
                target = self._unbuilt()
        number = rng.choice(found)
        until = time.monotonic() + rng.uniform(0, {"build": 0.3, "publish": 0.005, "running": 0.3}[moment])
        while moment == "running" and time.monotonic() < until:
            self.feed()
        time.sleep(max(0.0, until - time.monotonic()))
        return number

    def _unbuilt(self) -> str:
        """Submit a job whose input width has no stored schedule yet. Returns its id."""
        return self.submit(("npy", 100 + len(self.jobs)), priority=1).id

    def _running(self, job: str | None, *, publishing: bool) -> list[int]:
        """The numbers of the workers that run this job, or any job; only those that are `publishing`, if so."""
        running = self.store.jobs.list(states=[JobState.RUNNING])
        holders = {j.worker for j in running if job in (None, j.id) and (self._publishes(j) or not publishing)}
        pids = {info.pid for info in self.store.workers.live() if info.id in holders} if holders else set()
        return [number for number, worker in enumerate(self.workers) if worker.pid in pids]

    def _publishes(self, job: Job) -> bool:
        """Whether the job's manifest is there, in its hidden folder or already published."""
        path = self.folder / "out" / job.name
        return path.exists() or any(path.with_name(f".{job.name}.{job.id}").glob("attempt-*/manifest.json"))

    def kill(self, number: int, rng: random.Random) -> str:
        """SIGKILL a child, a supervisor, or both; a supervisor is replaced. Or stop both for longer than a lease."""
        worker = self.workers[number]
        children = zygote.spawned(worker.pid)
        victim = rng.choice(["child", "supervisor", "both", *(["stopped"] if SHARED else [])])
        if victim == "stopped":
            self._stop([*children, psutil.Process(worker.pid)], rng)
            return victim
        if victim != "supervisor":
            for child in children:
                with suppress(psutil.NoSuchProcess):  # it may be ending by itself
                    child.kill()
        if victim != "child":
            worker.kill()
            worker.wait()
            _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
            assert not alive, "the child outlived its supervisor"
            self.workers[number] = self._worker()
        return victim

    def _stop(self, processes: list[psutil.Process], rng: random.Random) -> None:
        rng.shuffle(processes)  # whoever goes on first
        for change in ("suspend", "resume"):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    getattr(process, change)()
            if change == "suspend":
                time.sleep(1.5 * LEASE_S)

    def lost(self) -> int:
        """How many attempts were lost; a few kills can all come between two jobs."""
        attempts = (attempt for job, _ in self.jobs for attempt in self.store.jobs.attempts(job.id))
        return sum(attempt.outcome == "lost" for attempt in attempts)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.log.close()

    def _worker(self) -> subprocess.Popen[bytes]:
        home = self.homes[self.started % len(self.homes)]
        self.started += 1
        command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(home), "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # several processes share few cores
        return prefork.start(command, stderr=self.log, stdout=self.log, env=environment)


@contextmanager
def farm(folder: Path) -> Iterator[Farm]:
    with database(), open_store(resolve(str(folder / "home"))) as store:
        opened = Farm(folder, store)
        try:
            yield opened
        finally:
            opened.close()
            print((folder / "workers.log").read_text()[-20_000:])  # seen where the test fails


@contextmanager
def database() -> Iterator[None]:
    """In the environment of the block: PostgreSQL, if these rounds use it."""
    with ExitStack() as held:
        if SHARED:
            patch = held.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("NIMBLE_JOBS_DB", held.enter_context(postgres.schema()))
            patch.setenv("NIMBLE_JOBS_LEASE_S", str(LEASE_S))
        yield


def output_of(path: Path) -> dict[str, str]:
    """SHA-256 of every file of a published output, checked against its manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    found = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.iterdir() if f.name != "manifest.json"}
    assert {entry["name"]: entry["sha256"] for entry in manifest["files"]} == found
    return found


@pytest.mark.timeout(600 + 30 * ROUNDS)
def test_kill_rounds(tmp_path: Path) -> None:
    """Supervisors, children or both are killed at random moments. No job is lost, published twice or changed."""
    print("seed", SEED)
    rng = random.Random(SEED)
    kills: Counter[str] = Counter()
    start = time.monotonic()
    with farm(tmp_path) as killed:
        expected = killed.run(VARIANTS)
        killed.grow()
        for round_number in range(10 * ROUNDS):
            if round_number >= ROUNDS and killed.lost() >= ROUNDS // 3:
                break
            moment = MOMENTS[round_number % len(MOMENTS)]
            victim = killed.kill(killed.aim(moment, rng), rng)
            kills.update([moment, victim])
        client.wait([job.id for job, _ in killed.jobs], store=killed.store, timeout_s=300)
        expected |= killed.run({variant for _, variant in killed.jobs} - set(expected))

        outcomes: Counter[str] = Counter()
        building = adopted = 0
        for job, variant in killed.jobs:
            ended = killed.store.jobs.get(job.id)
            assert ended.state is JobState.SUCCEEDED, f"{job.name}: {ended.state}: {ended.error}"
            assert output_of(tmp_path / "out" / job.name) == expected[variant], job.name
            attempts = [str(attempt.outcome) for attempt in killed.store.jobs.attempts(job.id)]
            assert attempts == ["lost"] * (len(attempts) - 1) + ["succeeded"]
            assert ended.records_done == 320
            outcomes.update(attempts)
            building += (len(attempts) - 1) * (variant not in VARIANTS)
            adopted += sum(event.kind == "published" for event in killed.store.jobs.events(job.id))
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(job.name for job, _ in killed.jobs)
        assert killed.store.check() == []
        print(f"{ROUNDS} rounds in {time.monotonic() - start:.0f} s: {len(killed.jobs)} jobs, {dict(kills)}")
        print(f"attempts {dict(outcomes)}; lost with a schedule to build {building}, after publication {adopted}")
        assert outcomes["lost"] >= ROUNDS // 3, "the kills hardly hit a job"
