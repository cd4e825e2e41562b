"""Workers as Slurm and Kubernetes start them: the printed script and the manifest's command are run, and score jobs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import postgres, prefork
from tests.cli import Cli
from tests.waiting import PATIENCE_S, until

COMMAND = str(Path(sys.executable).with_name("nimble-jobs"))
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_ARRAY_JOB_ID": "4242",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_ARRAY_TASK_COUNT": "1",
    "SLURM_NTASKS": "1",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_RESTART_COUNT": "0",
}
SPEC = """
version: 1
name: burst
kind: score
model: {source: "python:model.py:small"}
input: {source: x.npy, format: npy, batch_size: 8}
output: {path: out, format: npy, fields: [id, logits], shard_size: 8}
"""
MODEL = """
import time
from pathlib import Path
import torch

HERE = Path(__file__).parent

class Slow(torch.nn.Module):
    def forward(self, x):
        while x[0, 0] >= 160 and (HERE / "held").exists():
            time.sleep(0.01)
        if (HERE / "slow").exists():
            time.sleep(1.0)
        return x * 2

def small():
    return Slow()
"""


def environment(**more: str) -> dict[str, str]:
    """Variables of a machine on which nobody has set up anything."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("NIMBLE_JOBS_")}
    return ours | {"OMP_WAIT_POLICY": "passive"} | more


def lay_out(folder: Path) -> Path:
    """A spec of ten shards. The model does not begin the sixth one as long as there is a file `held`; with a file
    `slow`, each takes a second.
    """
    np.save(folder / "x.npy", np.arange(320, dtype=np.float32).reshape(80, 4))
    (folder / "model.py").write_text(MODEL)
    (folder / "spec.yaml").write_text(SPEC)
    return folder / "spec.yaml"


def check(folder: Path) -> None:
    """Every record is there, once, and right."""
    parts = sorted((folder / "out").glob("part-*.logits.npy"))
    got = np.concatenate([np.load(part) for part in parts])
    np.testing.assert_array_equal(got, 2 * np.arange(320, dtype=np.float32).reshape(80, 4))


@pytest.fixture
def batch_job(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a batch system would have started; none is left behind."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=PATIENCE_S)
    print((tmp_path / "log").read_text())  # seen where a test fails


@pytest.fixture
def database() -> Iterator[str]:
    """The address of an empty PostgreSQL database."""
    with postgres.schema() as url:
        yield url


def sbatch(
    store: Store, capsys: pytest.CaptureFixture[str], folder: Path, *given: str, cold: bool = False, **more: str
) -> subprocess.Popen[str]:
    """The printed script as Slurm's daemon runs it: a file, in a session of its own, with its variables. Where it is
    not `cold`, the worker that it starts may be forked.
    """
    printed = Cli(store.home, capsys)("worker", "script", "slurm", "--gpus", "0", *given)
    assert (printed.code, printed.err) == (0, "")
    script = folder / f"slurm_script_{len(list(folder.glob('slurm_script_*')))}"
    assert printed.out.count(f"exec {COMMAND} ") == 1
    forked = shlex.join([*prefork.words(), COMMAND])
    script.write_text(printed.out if cold else printed.out.replace(f"exec {COMMAND} ", f"exec {forked} "))
    script.chmod(0o700)
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [script], env=environment(**SLURM, **more), stderr=log, text=True, start_new_session=True
        )


def submitted(store: Store, folder: Path, *, held: bool = False) -> Job:
    if held:
        (folder / "held").touch()
    return client.submit(lay_out(folder), store=store, allow_python=[folder])


def go_on_slowly(folder: Path) -> None:
    """A job that was held is not at its end before its worker knows that it is to stop."""
    (folder / "slow").touch()
    (folder / "held").unlink()


def test_a_slurm_task_scores_a_job_and_ends(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path, batch_job: list[subprocess.Popen[str]]
) -> None:
    """It takes the queued job, and exits with 0 once there was no work for a while."""
    job = submitted(store, tmp_path)
    batch_job.append(sbatch(store, capsys, tmp_path, "--max-idle", "1s"))
    assert batch_job[0].wait(timeout=PATIENCE_S) == 0
    assert store.jobs.get(job.id).state is JobState.SUCCEEDED
    assert "idle for 1 s" in (tmp_path / "log").read_text()
    check(tmp_path)


def test_slurms_signal_reaches_the_worker(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path, batch_job: list[subprocess.Popen[str]]
) -> None:
    """`--signal=B:TERM` goes to the batch shell alone. The job is queued, the task ends with 0, the next goes on."""
    job = submitted(store, tmp_path, held=True)
    batch_job.append(sbatch(store, capsys, tmp_path, cold=True))
    until(lambda: (store.jobs.get(job.id).records_done or 0) >= 16)
    os.kill(batch_job[0].pid, signal.SIGTERM)
    go_on_slowly(tmp_path)
    assert batch_job[0].wait(timeout=PATIENCE_S) == 0
    (tmp_path / "slow").unlink()
    after = store.jobs.get(job.id)
    assert after.state is JobState.QUEUED
    assert [attempt.outcome for attempt in store.jobs.attempts(job.id)] == ["requeued"]
    batch_job.append(sbatch(store, capsys, tmp_path, "--max-idle", "1s"))
    assert batch_job[1].wait(timeout=PATIENCE_S) == 0
    assert [attempt.outcome for attempt in store.jobs.attempts(job.id)] == ["requeued", "succeeded"]
    check(tmp_path)


def test_a_pod_scores_a_job_and_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    """The manifest's command, with its variables and those of the ConfigMap and the Secret, over a PostgreSQL database.
    Its state folder is fresh; the job was submitted from another one.
    """
    given = ["--image", "x/y:1", "--claim", "shared", "--gpus", "0", "--max-idle", "1s"]
    printed = Cli(tmp_path / "home", capsys)("worker", "script", "kubernetes", *given)
    assert (printed.code, printed.err) == (0, "")
    (container,) = yaml.safe_load(printed.out)["spec"]["template"]["spec"]["containers"]
    folder = str(tmp_path / "state")
    from_others = {"NIMBLE_JOBS_DB": database, "PGPASSWORD": "never printed"}
    variables = {
        each["name"]: each["value"].replace("/state", folder, 1) if "value" in each else from_others[each["name"]]
        for each in container["env"]
    }
    monkeypatch.setenv("NIMBLE_JOBS_DB", database)
    Path(folder).mkdir()
    with open_store(resolve(str(tmp_path / "submitted"))) as store:
        job = submitted(store, tmp_path)
        words = [COMMAND if word == "nimble-jobs" else word for word in container["command"]]
        done = prefork.run(
            [sys.executable, *words], env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (done.returncode, done.stdout) == (0, "")
        assert store.jobs.get(job.id).state is JobState.SUCCEEDED
    assert "never printed" not in done.stderr
    check(tmp_path)


def test_tasks_on_two_nodes_share_one_queue(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    database: str,
    batch_job: list[subprocess.Popen[str]],
) -> None:
    """Each has a state folder of its own. One is stopped in the middle of its job, which the other one finishes."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", database)
    with open_store(resolve(str(tmp_path / "submitted"))) as store:
        jobs = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            jobs.append(submitted(store, tmp_path / name, held=True))
        for node in ("node-1", "node-2"):
            given = ["--node-home", str(tmp_path / node), "--max-idle", "3s"]
            batch_job.append(sbatch(store, capsys, tmp_path, *given, NIMBLE_JOBS_DB=database))
        until(lambda: all((store.jobs.get(job.id).records_done or 0) >= 16 for job in jobs))
        assert len({row.pid for row in store.workers.live("worker")}) == 2
        batch_job[0].send_signal(signal.SIGTERM)
        for name in ("a", "b"):
            go_on_slowly(tmp_path / name)
        assert batch_job[0].wait(timeout=PATIENCE_S) == 0
        for name in ("a", "b"):
            (tmp_path / name / "slow").unlink()
        assert batch_job[1].wait(timeout=PATIENCE_S) == 0
        assert [store.jobs.get(job.id).state for job in jobs] == [JobState.SUCCEEDED] * 2
        outcomes = [[attempt.outcome for attempt in store.jobs.attempts(job.id)] for job in jobs]
        assert sorted(outcomes) == [["requeued", "succeeded"], ["succeeded"]]
    for name in ("a", "b"):
        check(tmp_path / name)


def test_time_is_counted(store: Store, tmp_path: Path) -> None:
    """`worker start` in the foreground ends at its `--max-time`."""
    began = time.monotonic()
    words = [sys.executable, COMMAND, "--home", str(store.home), "worker", "start", "--device", "cpu"]
    done = prefork.run([*words, "--max-time", "3s"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "")
    assert "its time is over" in done.stderr
    assert time.monotonic() - began >= 3.0
