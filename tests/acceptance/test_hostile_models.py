"""What models do to the process that runs them: strange errors, and processes of their own that live on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_fakes import submit
from worker_processes import Start, ended

from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from tests.waiting import PATIENCE_S, until

FORKS = """
import multiprocessing, os, subprocess, sys, time
from pathlib import Path
from nimble_jobs.store import open_store

home, way, note = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def live_on():
    note.write_text(str(os.getpid()))
    time.sleep(600)

def start():
    if way == "fork":
        if os.fork() == 0:
            live_on()
    elif way == "subprocess":
        process = subprocess.Popen(["sleep", "600"], close_fds=False)
        note.write_text(str(process.pid))
    else:
        multiprocessing.get_context("fork").Process(target=live_on).start()
    while not note.exists() or not note.read_text():
        time.sleep(0.01)

store = open_store(home)
with store.workers.hold({"role": "run"}), store.artifacts.in_use():
    with store.builds.turn("k", limit_s=5, waiting=lambda wait: None) as mine:
        assert mine
        start()
        os._exit(0)
"""


@pytest.fixture
def note(tmp_path: Path) -> Iterator[Path]:
    """Where a process that lives on says who it is; it is ended after the test."""
    path = tmp_path / "note"
    yield path
    if path.exists():
        os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("way", ["fork", "subprocess", "multiprocessing"])
def test_a_process_of_the_models_making_holds_no_lock(store: Store, note: Path, tmp_path: Path, way: str) -> None:
    """A model may start a process that outlives it: the locks of worker, build and artifacts do not."""
    (tmp_path / "forks.py").write_text(FORKS)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "forks.py"), str(store.home), way, str(note)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    os.kill(int(note.read_text()), 0)  # it lives
    assert store.workers.live() == []
    with store.builds.turn("k", limit_s=0.0, waiting=lambda _: None) as mine:
        assert mine
    with store.artifacts.alone():
        pass


@pytest.mark.parametrize("error", ["surrogate", "nul", "long", "mute", "base"])
def test_whatever_a_model_raises_is_kept(store: Store, start: Start, tmp_path: Path, error: str) -> None:
    """A lone surrogate, a NUL, a megabyte, an error without a text, or one that is no Exception fails the job, not the
    worker; the log has the whole of it.
    """
    job, other = submit(store, tmp_path, do="raise", error=error), submit(store, tmp_path, name="other", do="batches")
    worker = start()
    done, next_done = ended(store, job, other)
    assert done.state is JobState.FAILED
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["failed"]
    assert next_done.state is JobState.SUCCEEDED
    assert len(set((tmp_path / "other.note").read_text().split()[1::3])) == 1
    assert worker.poll() is None
    said = done.error or ""
    assert len(said.encode()) <= 16 * 1024
    words = {
        "surrogate": "\\udc80",
        "nul": "a\\x00b",
        "long": "nimble-jobs logs",
        "mute": "making its message failed",
        "base": "Odd",
    }
    assert words[error] in said
    if error == "long":
        log = until(
            lambda: (text := (store.home / "logs" / f"{job.id}.log").read_text()).count("x") >= 1 << 20 and text
        )
        assert "JobFailed" in log or "ValueError" in log
    with open_store(store.home) as again:
        assert again.check() == []
