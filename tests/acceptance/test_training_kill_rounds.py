"""SIGKILL at random moments of trainings, checkpoint writes included: the published bytes are always the same.

NIMBLE_JOBS_KILL_ROUNDS sets the number of rounds, three by default and twenty with --all;
NIMBLE_JOBS_KILL_SEED the random moments.
docs/measurements/training-kill-rounds.md holds the result of thirty.
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
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import prefork, zygote
from tests.seeds import seed
from tests.trainings import digests, lay_out
from tests.waiting import PATIENCE_S

ROUNDS = int(os.environ["NIMBLE_JOBS_KILL_ROUNDS"])
SEED = seed()
MOMENTS = ("writing", "running", "publish", "any")  # when a round kills; they take turns
VARIANTS = {
    "sgd": "optimizer: {name: sgd, lr: 0.02, momentum: 0.9}\n  checkpoint: {every_steps: 3, best: loss}",
    "adamw": "optimizer: {name: adamw, lr: 0.003}\n  accumulate: 2\n  checkpoint: {every_steps: 2, keep_last: 1}",
}
SPEC = """
version: 1
name: {name}
kind: finetune
model: {{source: "python:model.py:net"}}
input: {{source: train.npz, format: npz, fields: {{x: images, label: labels}}, batch_size: 8}}
output: {{path: out/{name}}}
schedule: {{on_miss: eager}}
train:
  epochs: 150
  augment: {{crop_padding: 1}}
  {variant}
run: {{retry: {{max_attempts: 100, backoff: constant, initial: 50ms}}}}
"""


class Trainer:
    """A worker that is killed and started again, and its trainings."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        self.jobs: dict[str, str] = {}  # id, variant
        self.log = (folder / "worker.log").open("a")
        self.worker = self._start()
        lay_out(folder)

    def submit(self, variant: str) -> Job:
        name = f"{variant}-{len(self.jobs)}"
        path = self.folder / f"{name}.yaml"
        path.write_text(SPEC.format(name=name, variant=VARIANTS[variant]))
        job = client.submit(path, store=self.store, allow_python=[self.folder])
        self.jobs[job.id] = variant
        return job

    def output(self, job: Job) -> dict[str, str]:
        """SHA-256 of each published file, checked against the manifest. The picture contains the job's name."""
        path = self.folder / "out" / job.name
        found = digests(path)
        manifest = json.loads((path / "manifest.json").read_text())
        assert {entry["name"]: entry["sha256"] for entry in manifest["files"]} == found
        return {name: digest for name, digest in found.items() if name != "curves.png"}

    def resumed(self) -> bool:
        """Whether any training has resumed from a checkpoint; a few kills can all come before the first one."""
        return any(event.kind == "resumed" for job_id in self.jobs for event in self.store.jobs.events(job_id))

    def running(self) -> Job:
        """The training that runs now; there always is one."""
        deadline = time.monotonic() + 120
        while not (found := self.store.jobs.list(states=[JobState.RUNNING])):
            assert time.monotonic() < deadline, "no training starts"
            if not self.store.jobs.list(states=[JobState.QUEUED]):
                self.submit(list(VARIANTS)[len(self.jobs) % len(VARIANTS)])
            time.sleep(0.01)
        return found[0]

    def aim(self, moment: str, rng: random.Random) -> None:
        """Wait for a moment of the given kind: while training, writing a checkpoint, about to publish, or any."""
        if moment == "any":
            time.sleep(rng.uniform(0, 3.0))
            return
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline, f"no training reached: {moment}"
            job = self.running()
            if moment == "publish" and job.phase == "publish":
                return
            if moment == "running" and job.phase == "run":
                time.sleep(rng.uniform(0, 2.0))
                return
            if moment == "writing" and list((self.folder / "out").glob(".*.training/*/.tmp-*")):
                time.sleep(rng.uniform(0, 0.002))
                return
            if moment == "writing" and job.phase == "run":
                continue  # a write takes milliseconds
            time.sleep(0.002)

    def kill(self, rng: random.Random) -> str:
        """SIGKILL the child, the supervisor, or both; a supervisor is replaced."""
        children = zygote.spawned(self.worker.pid)
        victim = rng.choice(["child", "supervisor", "both"])
        if victim != "supervisor":
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        if victim != "child":
            self.worker.kill()
            self.worker.wait()
            _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
            assert not alive, "the child outlived its supervisor"
            self.worker = self._start()
        return victim

    def close(self) -> None:
        self.worker.kill()
        self.worker.wait()
        self.log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(self.store.home), "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # several processes share few cores
        return prefork.start(command, stderr=self.log, stdout=self.log, env=environment)


@contextmanager
def trainer(folder: Path) -> Iterator[Trainer]:
    with open_store(resolve(str(folder / "home"))) as store:
        opened = Trainer(folder, store)
        try:
            yield opened
        finally:
            opened.close()
            print((folder / "worker.log").read_text()[-20_000:])  # seen where the test fails


@pytest.mark.timeout(400 + 60 * ROUNDS)
def test_training_kill_rounds(tmp_path: Path) -> None:
    """Workers, their children or both are killed at random moments; every training ends with the undisturbed bytes."""
    print("seed", SEED)
    rng = random.Random(SEED)
    kills: Counter[str] = Counter()
    start = time.monotonic()
    with trainer(tmp_path) as killed:
        first = {variant: killed.submit(variant) for variant in VARIANTS}
        client.wait([job.id for job in first.values()], store=killed.store, timeout_s=300)
        expected = {variant: killed.output(job) for variant, job in first.items()}
        for number in range(10 * ROUNDS):
            if number >= ROUNDS and killed.resumed():
                break
            moment = MOMENTS[number % len(MOMENTS)]
            killed.aim(moment, rng)
            kills.update([moment, killed.kill(rng)])
        client.wait(list(killed.jobs), store=killed.store, timeout_s=400)

        outcomes: Counter[str] = Counter()
        events: Counter[str] = Counter()
        for job_id, variant in killed.jobs.items():
            ended = killed.store.jobs.get(job_id)
            assert ended.state is JobState.SUCCEEDED, f"{ended.name}: {ended.state}: {ended.error}"
            assert killed.output(ended) == expected[variant], ended.name
            attempts = [str(attempt.outcome) for attempt in killed.store.jobs.attempts(job_id)]
            assert attempts == ["lost"] * (len(attempts) - 1) + ["succeeded"]
            outcomes.update(attempts)
            said = killed.store.jobs.events(job_id)
            events.update(event.kind for event in said)
            assert all(event.data["exact"] for event in said if event.kind == "resumed")
        assert events["checkpoint-damaged"] == 0, "a kill alone damages no checkpoint"
        left = sorted(p.name for p in (tmp_path / "out").iterdir())
        assert left == sorted(killed.store.jobs.get(job_id).name for job_id in killed.jobs)
        assert killed.store.check() == []
        print(f"{ROUNDS} rounds in {time.monotonic() - start:.0f} s: {len(killed.jobs)} trainings, {dict(kills)}")
        print(f"attempts {dict(outcomes)}; resumed {events['resumed']}, after publication {events['published']}")
        assert outcomes["lost"] >= ROUNDS // 3, "the kills hardly hit a training"
        assert events["resumed"] >= 1
