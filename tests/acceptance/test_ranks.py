"""A training on two ranks under a real worker: one is killed, and the job goes on to the undisturbed bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nimble_jobs import client
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads.training.ranks.followers import PROGRAM
from tests import prefork, zygote
from tests.trainings import digests, lay_out

MODEL = """
import itertools
import time
from pathlib import Path

from torch import nn

GO = Path(__file__).with_name("go")
CALLS = itertools.count(1)


class Waits(nn.Module):
    def forward(self, x):
        while next(CALLS) > 60 and not GO.exists():
            time.sleep(0.01)
        return x


def net():
    return nn.Sequential(
        Waits(), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(4),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 4),
    )
"""
SPEC = """
version: 1
name: net
kind: finetune
model: {source: "python:ranks.py:net"}
input: {source: train.npz, format: npz, fields: {x: images, label: labels}, batch_size: 8}
output: {path: out/net, if_exists: replace}
schedule: {on_miss: eager}
train:
  epochs: 20
  checkpoint: {every_steps: 20}
run: {device: cpu, gpus: 2, retry: {initial: 0.1}}
"""
SHORT = """
import itertools

import torch
from torch import nn
from nimble_jobs.engine import collectives
from nimble_jobs.errors import EngineError

CALLS = itertools.count(1)


@torch.library.custom_op("nimble_tests::fits", mutates_args=())
def fits(x: torch.Tensor) -> torch.Tensor:
    group = collectives._LOCAL.group
    if group is not None and group.rank() == RANK and next(CALLS) == CALL:
        raise ERROR
    return x.clone()


fits.register_fake(torch.empty_like)
fits.register_autograd(lambda ctx, gradient: gradient)


class Fits(nn.Module):
    def forward(self, x):
        return fits(x)


def net():
    return nn.Sequential(nn.Flatten(), Fits(), nn.Linear(64, 4))
"""


def start(store: Store, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(store.home), "--device", "cpu"]
    with log.open("a") as file:
        return prefork.start(command, stderr=file, stdout=file, env=os.environ | {"OMP_NUM_THREADS": "1"})


def follower_of(worker: int) -> psutil.Process | None:
    """The process of the other rank, if it runs."""
    for process in psutil.Process(worker).children(recursive=True):
        try:
            if PROGRAM in process.cmdline() or process.name() == zygote.FOLLOWER:
                return process
        except psutil.Error:  # it has just ended
            continue
    return None


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_ends_the_attempt_and_the_next_one_goes_on_exactly(tmp_path: Path) -> None:
    """Dropout has masks of its own on each rank, whose random states the checkpoint holds, too."""
    lay_out(tmp_path)
    (tmp_path / "ranks.py").write_text(MODEL)
    spec = tmp_path / "net.yaml"
    spec.write_text(SPEC)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        worker = start(store, tmp_path / "log")
        try:
            killed = client.submit(spec, store=store, allow_python=[tmp_path])
            whole = client.submit(spec, overrides=["output.path=out/whole"], store=store, allow_python=[tmp_path])
            deadline = time.monotonic() + 120
            while not list((tmp_path / "out").glob(".net.training/*/step-*")):
                assert time.monotonic() < deadline, "the training does not start"
                time.sleep(0.002)
            follower = follower_of(worker.pid)
            assert follower is not None
            follower.send_signal(signal.SIGKILL)
            (tmp_path / "go").touch()
            done, undisturbed = client.wait([killed.id, whole.id], store=store, timeout_s=200)
            left = follower_of(worker.pid)
        finally:
            worker.kill()
            worker.wait()
            print((tmp_path / "log").read_text()[-5000:])
        assert (done.state, undisturbed.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
        first, second = store.jobs.attempts(killed.id)
        assert (first.outcome, second.outcome) == ("failed", "succeeded")
        assert first.error == "the process of rank 1 ended: killed by SIGKILL"
        events = {event.kind: event for event in store.jobs.events(killed.id)}
        assert events["resumed"].data["exact"]
        assert events["ranks"].message == "trains on 2 devices: cpu, cpu"
        assert left is None
    assert digests(tmp_path / "out/net") == digests(tmp_path / "out/whole")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rank", "call", "error", "told"),
    [
        pytest.param(
            1,
            1,
            'RuntimeError("CUDA error: out of memory")',
            "rank 1 (cpu): not enough memory on cpu to capture the schedule: CUDA error: out of memory",
            id="memory",
        ),
        pytest.param(1, 1, 'EngineError("no such kernel")', "rank 1 (cpu): no such kernel", id="capture"),
        pytest.param(1, 2, 'EngineError("no such kernel")', "rank 1 (cpu): no such kernel", id="check"),
        pytest.param(0, 1, 'EngineError("no such kernel")', "no such kernel", id="leader"),
    ],
)
def test_a_rank_that_fails_alone_in_the_joint_capture_ends_the_attempt_with_its_reason(
    tmp_path: Path, rank: int, call: int, error: str, told: str
) -> None:
    """Before, it captured the same alone. The other rank waits for its sum meanwhile, and sees only that it is gone.
    Did it wait as long as run.stall, that would be the reason.
    """
    lay_out(tmp_path)
    (tmp_path / "ranks.py").write_text(f"RANK, CALL = {rank}, {call}\n{SHORT.replace('ERROR', error)}")
    spec = tmp_path / "net.yaml"
    spec.write_text(SPEC)
    overrides = [
        "schedule.on_miss=build",
        "schedule.progressive=false",
        "schedule.streams=1",
        "schedule.fuse=off",
        "run.stall=60s",
    ]
    with open_store(resolve(str(tmp_path / "home"))) as store:
        job = client.submit(spec, overrides=overrides, store=store, allow_python=[tmp_path], foreground=True)
        done = run_inline(store, job.id)
    assert done.state is JobState.FAILED
    assert done.error == told
