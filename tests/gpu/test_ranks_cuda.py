"""Trainings on several GPUs: sums inside CUDA graphs, over NCCL. All but one test need two GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nimble_jobs import client
from nimble_jobs.engine.collectives import rehearsing
from nimble_jobs.graph.collectives import collectives
from nimble_jobs.job import Job, JobState
from nimble_jobs.planner.step.build import CapturedStep, prepare_step
from nimble_jobs.planner.step.request import OptimizerRecipe, Ranks, StepRequest
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.foreground import run_inline
from tests.acceptance.test_ranks import follower_of
from tests.trainings import lay_out, metrics

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")

MODEL = """
import torch
from torch import nn


def net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4),
        nn.Flatten(), nn.Linear(128, 4),
    )
"""
SPEC = """
version: 1
name: net
kind: finetune
model: {source: "python:ranks.py:net"}
input: {source: train.npz, format: npz, fields: {x: images, label: labels}, batch_size: 8}
output: {path: out/net, if_exists: replace}
schedule: {fuse: "off", progressive: false}
train:
  epochs: 40
  checkpoint: {every_steps: 20}
  validation: {source: held-out.npz, every_epochs: 20}
run: {device: cuda, gpus: 2, retry: {initial: 0.1}}
"""
# Losses of 280 steps in fp32 (TF32 in convolutions), whose sums are taken in another order.
ROUNDING = 2e-2


def lay_out_spec(folder: Path) -> Path:
    lay_out(folder)
    (folder / "ranks.py").write_text(MODEL)
    spec = folder / "net.yaml"
    spec.write_text(SPEC)
    return spec


def trained(store: Store, spec: Path, *overrides: str) -> Job:
    queued = client.submit(spec, overrides=overrides, store=store, allow_python=[spec.parent], foreground=True)
    return run_inline(store, queued.id)


def start(store: Store, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(store.home), "--device", "cuda:0"]
    with log.open("a") as file:
        return subprocess.Popen(command, stderr=file, stdout=file)


def test_a_step_of_several_ranks_is_captured_with_its_sums(device: torch.device) -> None:
    """While it rehearses, one GPU is enough: the sums are tasks of the graph, on a stream of their own."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    request = StepRequest(
        module=module.to(device).train(),
        x=torch.randn(4, 3, 8, 8, device=device),
        y=torch.tensor([0, 1, 2, 3], device=device),
        loss=nn.CrossEntropyLoss(),
        loss_name="cross_entropy",
        optimizer=OptimizerRecipe(name="sgd", momentum=0.9),
        ranks=Ranks(count=2, bucket_bytes=1000),
    )
    with rehearsing():
        step = prepare_step(request, device=device)
    assert isinstance(step, CapturedStep), step.fallback
    assert step.schedule is not None
    assert len(collectives(step.schedule.program)) >= 3
    assert step.schedule.plan.streams >= 2
    step.close()


@two_gpus
def test_two_gpus_train_as_one_does(tmp_path: Path) -> None:
    """The same losses up to rounding, and the sums run inside of replays."""
    spec = lay_out_spec(tmp_path)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        one = trained(store, spec, "run.gpus=1", "output.path=out/one")
        two = trained(store, spec)
    assert (one.state, two.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED), (one.error, two.error)
    assert two.schedule["runs"] == "schedule"
    assert two.schedule["ranks"] == 2
    losses = [np.array([line["loss"] for line in metrics(tmp_path / "out" / n, "step")]) for n in ("one", "net")]
    assert losses[1][:20] == pytest.approx(losses[0][:20], rel=ROUNDING)
    validations: list[Any] = [metrics(tmp_path / "out" / n, "epoch")[-1]["val_loss"] for n in ("one", "net")]
    assert validations[1] == pytest.approx(validations[0], rel=10 * ROUNDING)


@two_gpus
def test_a_rank_that_is_killed_during_replays_ends_the_attempt(tmp_path: Path) -> None:
    """Kernels that wait for it are ended; the next attempt goes on to the bytes of an undisturbed training."""
    spec = lay_out_spec(tmp_path)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        worker = start(store, tmp_path / "log")
        try:
            killed = client.submit(spec, store=store, allow_python=[tmp_path])
            whole = client.submit(spec, overrides=["output.path=out/whole"], store=store, allow_python=[tmp_path])
            deadline = time.monotonic() + 300
            while not list((tmp_path / "out").glob(".net.training/*/step-*")):
                assert time.monotonic() < deadline, "the training does not start"
                time.sleep(0.002)
            follower = follower_of(worker.pid)
            assert follower is not None
            os.kill(follower.pid, signal.SIGKILL)
            done, undisturbed = client.wait([killed.id, whole.id], store=store, timeout_s=600)
        finally:
            worker.kill()
            worker.wait()
            print((tmp_path / "log").read_text()[-5000:])
        assert (done.state, undisturbed.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
        assert [a.outcome for a in store.jobs.attempts(killed.id)] == ["failed", "succeeded"]
    expected = load_file(tmp_path / "out/whole/model.safetensors")
    for name, tensor in load_file(tmp_path / "out/net/model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name
