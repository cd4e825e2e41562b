"""Jobs run by real commands in real processes, with a model small enough for a few seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests import prefork

MODEL = """\
import torch


class Tiny(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.head = torch.nn.Linear(4, classes)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def make(classes=3):
    return Tiny(classes)
"""
SPEC = """\
version: 1
name: tiny
kind: score
model:
  source: python:model.py:make
input:
  source: data.npz
  format: npz
  fields: {x: x, id: ids}
  batch_size: 4
  transform: {scale: 1.0}
schedule: {progressive: false}
output:
  path: out
  fields: [id, top1, logits]
  if_exists: replace
"""
COUNT = 10  # no multiple of the batch size


class Commands:
    """Runs `nimble-jobs` over one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "NIMBLE_JOBS_HOME": str(folder / "home"),
            "NIMBLE_JOBS_ALLOW_PYTHON": str(folder),
        }

    def __call__(self, *args: str, timeout: float = 120, cold: bool = False) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "nimble_jobs.cli.main", *args]
        run = subprocess.run if cold else prefork.run
        return run(words, capture_output=True, text=True, env=self.environment, cwd=self.folder, timeout=timeout)

    def show(self, job_id: str) -> dict:
        return json.loads(self("show", job_id, "--json").stdout)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC)
    x = np.random.default_rng(0).standard_normal((COUNT, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, ids=np.array([f"r{i}" for i in range(COUNT)]))
    return Commands(tmp_path)


def published(folder: Path) -> list[dict]:
    """The rows of the Parquet files in an output folder."""
    return pq.read_table(sorted(folder.glob("*.parquet"))).to_pylist()


def test_run_needs_no_worker(commands: Commands) -> None:
    """`run` builds the schedule, publishes every record once, exits 0; a second run finds the schedule stored."""
    first = commands("run", "job.yaml", cold=True)
    assert first.returncode == 0, first.stderr
    assert first.stdout == ""
    rows = published(commands.folder / "out")
    assert [row["id"] for row in rows] == [f"r{i}" for i in range(COUNT)]
    second = commands("run", "job.yaml", "--json", "--quiet")
    shown = json.loads(second.stdout)
    assert (second.returncode, second.stderr, shown["state"], shown["schedule"]["hit"]) == (
        0,
        "",
        "succeeded",
        "stored",
    )
    assert published(commands.folder / "out") == rows
    explained = json.loads(commands("explain", "job.yaml", "--no-build", "--json").stdout)
    assert (explained["hit"], explained["key"]) == ("stored", shown["schedule"]["key"])
    assert explained["graph"]["syncs_needed"] == explained["graph"]["meg_edges"] - explained["graph"]["matching"]


def test_submit_wait_starts_a_worker_that_stays_for_the_next_job(commands: Commands) -> None:
    """`submit --wait` starts a worker; the next job finds the schedule resident; `worker stop` ends it."""
    first = commands("submit", "job.yaml", "--wait", cold=True)
    assert first.returncode == 0, first.stderr
    assert "starting a worker" in first.stderr
    try:
        second = commands("submit", "job.yaml", "output.path=again", "--wait")
        assert second.returncode == 0, second.stderr
        assert "starting a worker" not in second.stderr
        assert commands.show(second.stdout.strip())["schedule"]["hit"] == "resident"
        rows = json.loads(commands("cache", "ls", "--json").stdout)
        workers = json.loads(commands("worker", "ls", "--json").stdout)
        assert [row["resident"] for row in rows] == [[workers[0]["id"]]]
        assert published(commands.folder / "again") == published(commands.folder / "out")
    finally:
        stopped = commands("worker", "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(commands("worker", "ls", "--json").stdout) == []
    assert commands("doctor", "--no-device").returncode == 0


def test_a_pipe_in_the_place_of_an_input_holds_nobody_up(commands: Commands) -> None:
    """`submit` refuses it; one that comes after `submit` fails its job, and the job behind it runs."""
    data, pipe = commands.folder / "data.npz", commands.folder / "later.npz"
    os.mkfifo(pipe)
    refused = commands("submit", "job.yaml", "input.source=later.npz")
    assert refused.returncode == 2
    assert "is a named pipe; expected a regular file" in refused.stderr
    pipe.unlink()
    shutil.copy(data, pipe)
    first = commands("submit", "job.yaml", "input.source=later.npz", "output.path=first").stdout.strip()
    pipe.unlink()
    os.mkfifo(pipe)
    try:
        second = commands("submit", "job.yaml", "--wait")
        assert second.returncode == 0, second.stderr
    finally:
        commands("worker", "stop")
    failed = commands.show(first)
    assert (failed["state"], failed["attempt"]) == ("failed", 1)
    assert failed["error"] == f"{pipe}: is a named pipe; expected a regular file"
    assert len(published(commands.folder / "out")) == COUNT


def test_a_job_that_fails_says_why(commands: Commands) -> None:
    """A model with the wrong arguments fails with exit code 100, one line and no traceback."""
    answer = commands("run", "job.yaml", "model.args={colour: blue}")
    assert answer.returncode == 100
    assert "colour" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (commands.folder / "out").exists()


def test_ctrl_c_cancels_a_run(commands: Commands) -> None:
    """SIGINT ends `run` with exit code 103 and nothing published."""
    x = np.zeros((400_000, 1, 8, 8), dtype=np.float32)
    np.savez(commands.folder / "data.npz", x=x, ids=np.arange(len(x)).astype(str))
    words = [sys.executable, "-m", "nimble_jobs.cli.main", "run", "job.yaml", "input.batch_size=1"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with prefork.start(words, env=commands.environment, cwd=commands.folder, **pipes) as process:
        said = ""
        while " run " not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        said += process.stderr.read()
    assert process.returncode == 103, said
    assert not (commands.folder / "out").exists()
    assert json.loads(commands("ls", "--json").stdout)[0]["state"] == "cancelled"


def test_submit_wait_for_a_device_that_is_not_there_queues_nothing(commands: Commands) -> None:
    """Where no worker of this machine could take the job, it is cancelled, and one line says why."""
    commands.environment["CUDA_VISIBLE_DEVICES"] = ""
    ended = commands("submit", "job.yaml", "run.device=cuda", "--wait", "--quiet")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "nimble-jobs: run.device: cuda is not available; torch finds no CUDA device on this machine; "
        "the job was cancelled"
    )
    assert [job["state"] for job in json.loads(commands("ls", "--json").stdout)] == ["cancelled"]
