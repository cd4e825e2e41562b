"""Foreground jobs that block where nothing can interrupt them: they end all the same, and so does the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import prefork
from tests.waiting import PATIENCE_S, until

# The pool waits for its thread, as readers do; the thread waits for bytes that never come.
MODEL = """\
import os
from concurrent.futures import ThreadPoolExecutor
import torch


def read():
    with open("pipe", "rb") as file:
        open("blocked", "w").close()
        return file.read()


class Net(torch.nn.Linear):
    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(read).result()
        return super().forward(x)


def make():
    return Net(3, 2)
"""
SPEC = """\
version: 1
name: stuck
kind: score
model: {source: "python:model.py:make"}
input: {source: x.npy, format: npy, batch_size: 4}
output: {path: out, fields: [id, top1]}
schedule: {on_miss: eager}
run: {device: cpu}
"""
RUN = """\
import sys
from nimble_jobs.worker import foreground
foreground.CANCEL_GRACE_S = foreground.OVERTIME_S = 1.0
from nimble_jobs.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(SPEC)
    np.save(tmp_path / "x.npy", np.ones((4, 3), np.float32))
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    yield tmp_path
    os.close(writer)


@pytest.mark.parametrize("how", ["cancel", "cancel --now", "Ctrl-C", "Ctrl-C twice", "timeout", "stall"])
def test_a_run_that_blocks_in_a_read_ends(folder: Path, how: str) -> None:
    """By a command from elsewhere, a signal, its timeout or its stall, with that end's exit code; nothing is left."""
    environment = os.environ | {"NIMBLE_JOBS_HOME": str(folder / "home"), "NIMBLE_JOBS_ALLOW_PYTHON": str(folder)}
    words = [sys.executable, "-c", RUN, "run", "job.yaml"]
    if how in ("timeout", "stall"):
        words.append(f"run.{how}=8s")  # the model is reached by then, on busy cores too

    def command(*arguments: str) -> str:
        called = [sys.executable, "-m", "nimble_jobs.cli.main", *arguments]
        return prefork.run(
            called, env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
        ).stdout

    with prefork.start(words, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        until((folder / "blocked").exists)
        if how.startswith("cancel"):
            (job,) = json.loads(command("ls", "--json"))
            command("cancel", job["id"], *how.split()[1:])
        elif how.startswith("Ctrl-C"):
            process.send_signal(signal.SIGINT)
            if how == "Ctrl-C twice":
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == (100 if how in ("timeout", "stall") else 103)
        said = process.stderr.read().splitlines()
    (job,) = json.loads(command("ls", "--json"))
    ends = {
        "timeout": "timed out after 8s",
        "stall": "no progress for 8s (run.stall) in phase run, 0 of 4 records done",
    }
    assert (job["state"], job["error"]) == (("failed", ends[how]) if how in ends else ("cancelled", job["error"]))
    assert said[-1].startswith(f"nimble-jobs: stuck {job['id']} {job['state']}")
    assert [p.name for p in folder.iterdir() if p.name.startswith((".out", "out"))] == []
