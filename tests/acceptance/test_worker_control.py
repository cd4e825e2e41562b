"""Workers that are asked to pause, drain or restart while they run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from several_devices import stop
from worker_fakes import submit
from worker_processes import Start, child_of, ended, noted

from nimble_jobs import control
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, Wanted
from tests import prefork
from tests.waiting import PATIENCE_S, until


def cli(store: Store, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(store.home), *arguments]
    return prefork.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def ready(store: Store) -> Any:
    return until(lambda: [info for info in store.workers.live() if info.status == "ready"])[0]


def test_a_paused_worker_takes_no_jobs(store: Store, start: Start, tmp_path: Path) -> None:
    """The job at hand goes on; none begins, not even on a fresh child, until the worker is resumed."""
    first = submit(store, tmp_path, name="first", do="batches", gate=str(tmp_path / "gate"))
    worker = start(idle=600)
    until(lambda: noted(tmp_path, "first"))
    asked = control.ask(store, Wanted.PAUSE, [ready(store).id])
    assert list(control.answered(store, asked, timeout_s=PATIENCE_S)) == [asked[0].id]
    held = submit(store, tmp_path, name="held", do="batches")
    (tmp_path / "gate").touch()
    (done,) = ended(store, first)
    assert done.state is JobState.SUCCEEDED
    child_of(worker).kill()
    until(lambda: (tmp_path / "worker-0.log").read_text().count("ready on cpu") == 2)
    (shown,) = json.loads(cli(store, "worker", "ls", "--json").stdout)
    assert (shown["status"], shown["job"], shown["phase"]) == ("paused", None, None)
    (job,) = [row for row in json.loads(cli(store, "ls", "--json").stdout) if row["id"] == held.id]
    assert job["waits"] == "the only worker that can run it is paused; resume with: nimble-jobs worker resume"
    assert store.jobs.get(held.id).state is JobState.QUEUED
    said = cli(store, "worker", "resume", shown["id"][:4])
    assert (said.returncode, said.stderr) == (0, f"worker {shown['id']} (process {worker.pid}): takes jobs again\n")
    assert ended(store, held)[0].state is JobState.SUCCEEDED


def test_a_drained_worker_finishes_its_job_and_leaves(store: Store, start: Start, tmp_path: Path) -> None:
    """All of it, not only its shard; the next job stays queued; exit code 0."""
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    other = submit(store, tmp_path, name="other", do="batches")
    worker = start()
    until(lambda: noted(tmp_path))
    said = cli(store, "worker", "drain")
    words = f"finishes fake {job.id}, then stops"
    assert (said.returncode, said.stderr) == (0, f"worker {ready(store).id} (process {worker.pid}): {words}\n")
    (shown,) = json.loads(cli(store, "worker", "ls", "--json").stdout)
    assert (shown["status"], shown["job"], shown["phase"]) == ("draining", job.id, "run")
    (tmp_path / "gate").touch()
    assert cli(store, "worker", "drain", "--wait").returncode == 0
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert [store.jobs.get(j.id).state for j in (job, other)] == [JobState.SUCCEEDED, JobState.QUEUED]
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["succeeded"]


def test_a_restarted_worker_has_a_fresh_child(store: Store, start: Start, tmp_path: Path) -> None:
    """Its job is given back at a safe point, or taken away where it reaches none, and runs on in a new process."""
    job = submit(store, tmp_path, do="batches", count=2, gate=str(tmp_path / "gate"))
    worker = start(grace=1)
    until(lambda: noted(tmp_path))
    asked = control.restart(store)
    assert list(control.answered(store, asked, timeout_s=PATIENCE_S)) == [info.id for info in asked]
    until(lambda: store.jobs.attempts(job.id)[0].outcome)
    (tmp_path / "gate").touch()
    assert ended(store, job)[0].state is JobState.SUCCEEDED
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["requeued", "succeeded"]
    assert len({process for _, process, _ in noted(tmp_path)}) == 2
    hung = submit(store, tmp_path, name="hung", do="stall", how="sleep")
    until(lambda: noted(tmp_path, "hung"))
    control.restart(store)
    until(lambda: store.jobs.attempts(hung.id)[0].outcome == "requeued")
    assert worker.poll() is None


def test_a_worker_that_does_not_answer(store: Store, start: Start) -> None:
    """One that is stopped obeys when it goes on; the command says so, and does not wait for it."""
    worker = start()
    ready(store)
    stop(store, psutil.Process(worker.pid))
    try:
        said = cli(store, "worker", "drain")
        assert "has not answered yet; it obeys once it is responsive again" in said.stderr
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert worker.wait(timeout=PATIENCE_S) == 0


def test_those_that_start_later_are_paused_too(store: Store, start: Start, tmp_path: Path) -> None:
    """A pause of all survives the worker; nobody need be there for it."""
    said = cli(store, "worker", "pause", "--json")
    assert (said.returncode, said.stdout) == (0, "[]\n")
    job = submit(store, tmp_path, do="batches")
    start()
    ready(store)
    until(lambda: store.workers.live()[0].info.get("wanted") == "pause")
    assert store.jobs.get(job.id).state is JobState.QUEUED
    control.ask(store, Wanted.RUN)
    assert ended(store, job)[0].state is JobState.SUCCEEDED
