"""Random faults over scoring and training: nothing is lost, doubled or different.

NIMBLE_JOBS_FAULT_ROUNDS sets the number of rounds, four by default and two hundred with --all; NIMBLE_JOBS_KILL_SEED
the faults and their moments. docs/measurements/fault-rounds.md holds the result of two hundred.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults import Faults, environment

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.seeds import seed
from tests.trainings import MODEL, digests, lay_out
from tests.waiting import PATIENCE_S

ROUNDS = int(os.environ["NIMBLE_JOBS_FAULT_ROUNDS"])
SEED = seed()
CLOCK_FROM = 7  # rounds: in so many, one moves the clock
RETRY = "run: {retry: {max_attempts: 100, backoff: constant, initial: 50ms}}"
SCORE = """
version: 1
name: {name}
kind: score
model: {{source: "python:model.py:small"}}
input: {{source: x.npy, format: npy, batch_size: 16}}
output: {{path: out/{name}, format: {variant}, fields: [id, top1, logits], shard_size: 32}}
schedule: {{on_miss: eager}}
"""
TRAIN = """
version: 1
name: {name}
kind: finetune
model: {{source: "python:model.py:net"}}
input: {{source: train.npz, format: npz, fields: {{x: images, label: labels}}, batch_size: 8}}
output: {{path: out/{name}}}
schedule: {{on_miss: eager}}
train:
  epochs: 40
  augment: {{crop_padding: 1}}
  {variant}
"""
KINDS = {
    "score parquet": (SCORE, "parquet"),
    "sgd": (TRAIN, "optimizer: {name: sgd, lr: 0.02, momentum: 0.9}\n  checkpoint: {every_steps: 3, best: loss}"),
    "score npy": (SCORE, "npy"),
    "adamw": (TRAIN, "optimizer: {name: adamw, lr: 0.003}\n  accumulate: 2\n  checkpoint: {every_steps: 2}"),
    "score jsonl": (SCORE, "jsonl"),
}
SMALL = """

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of its own, of 64 MiB, for state and outputs; None where that cannot be had."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(path)], check=False)
    yield path if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class Queue:
    """The jobs that a worker is given, kept from running dry."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        self.jobs: dict[str, str] = {}  # id, kind
        lay_out(folder)
        (folder / "model.py").write_text(MODEL + SMALL)
        np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(320, 8)).astype(np.float32))

    def submit(self, kind: str) -> Job:
        text, variant = KINDS[kind]
        name = f"{kind.replace(' ', '-')}-{len(self.jobs)}"
        path = self.folder / f"{name}.yaml"
        path.write_text(text.format(name=name, variant=variant) + RETRY)
        job = client.submit(path, store=self.store, allow_python=[self.folder], now=float(len(self.jobs)))
        self.jobs[job.id] = kind
        return job

    def feed(self) -> None:
        """There is always a job that runs, and one that waits."""
        while sum(not self.store.jobs.get(job).state.final for job in list(self.jobs)[-4:]) < 2:
            self.submit(list(KINDS)[len(self.jobs) % len(KINDS)])

    def busy(self) -> bool:
        """Does a live worker run a job? One that is starting is worth a fault only now and then."""
        running = self.store.jobs.list(states=[JobState.RUNNING])
        return any(job.phase == "run" and self.store.workers.alive(job.worker or "") for job in running)

    def output(self, job: Job) -> dict[str, str]:
        """Digests of what a job published, after a look at its manifest. The picture has the job's name in it."""
        path = self.folder / "out" / job.name
        found = digests(path)
        manifest = json.loads((path / "manifest.json").read_text())
        assert {entry["name"]: entry["sha256"] for entry in manifest["files"]} == found
        return {name: digest for name, digest in found.items() if name != "curves.png"}


@pytest.mark.timeout(400 + 30 * ROUNDS)
def test_fault_rounds(tmp_path: Path, disk: Path | None) -> None:
    """Whatever comes over a worker, every job succeeds once, with the bytes of an undisturbed run."""
    print("seed", SEED)
    rng = random.Random(SEED)
    happened: Counter[str] = Counter()
    folder = disk or tmp_path
    begin = time.monotonic()
    log = (tmp_path / "worker.log").open("ab")
    with open_store(resolve(str(folder / "home"))) as store:
        queue = Queue(folder, store)

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(store.home), "--device", "cpu"]
            if ROUNDS < CLOCK_FROM:  # the clock stays as it is, so processes can be forked
                return prefork.start(command, stderr=log, stdout=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
            return subprocess.Popen(command, stderr=log, stdout=log, env=environment(tmp_path))

        faults = Faults(store, tmp_path, disk, start)
        try:
            first = {kind: queue.submit(kind) for kind in KINDS}
            client.wait([job.id for job in first.values()], store=store, timeout_s=300)
            expected = {kind: queue.output(job) for kind, job in first.items()}
            kinds = list(faults.kinds)
            for number in range(ROUNDS):
                queue.feed()
                until = time.monotonic() + PATIENCE_S
                while number % 4 and not queue.busy() and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.5))
                kind = kinds[number % len(kinds)] if number < len(kinds) else rng.choice(kinds)
                faults.kinds[kind](rng)
                happened[kind] += 1
                died = faults.worker.poll()
                assert died is None, f"after {kind} the worker left with {died}"
            client.wait(list(queue.jobs), store=store, timeout_s=400)

            outcomes: Counter[str] = Counter()
            for job_id, kind in queue.jobs.items():
                ended = store.jobs.get(job_id)
                assert ended.state is JobState.SUCCEEDED, f"{ended.name}: {ended.state}: {ended.error}"
                assert queue.output(ended) == expected[kind], ended.name
                attempts = [str(attempt.outcome) for attempt in store.jobs.attempts(job_id)]
                assert attempts[-1] == "succeeded"
                assert set(attempts[:-1]) <= {"lost", "requeued"}, attempts
                outcomes.update(attempts)
            names = sorted(p.name for p in (folder / "out").iterdir())
            assert names == sorted(store.jobs.get(job_id).name for job_id in queue.jobs)
            assert store.check() == []
            assert faults.worker.poll() is None
            jobs = Counter("training" if kind in ("sgd", "adamw") else "scoring" for kind in queue.jobs.values())
            print(f"{ROUNDS} rounds in {time.monotonic() - begin:.0f} s: jobs {dict(jobs)}, faults {dict(happened)}")
            print(f"attempts {dict(outcomes)}")
        finally:
            faults.worker.kill()
            faults.worker.wait()
            log.close()
            print((tmp_path / "worker.log").read_text()[-20_000:])  # seen where the test fails
