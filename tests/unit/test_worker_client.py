"""What the commands do, from Python."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nimble_jobs
from nimble_jobs import client
from nimble_jobs.errors import NotFinishedInTime, NotFound, SpecError, UsageError
from nimble_jobs.job import JobState
from nimble_jobs.settings import read_settings
from nimble_jobs.spec import load
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.waiting import PATIENCE_S

SPEC = """
version: 1
name: tiny
kind: score
model: {source: torchvision:resnet18}
input: {source: x.npy, format: npy}
output: {path: out}
run: {priority: 3, timeout: 2h, device: cpu, retry: {max_attempts: 7}}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    opened = open_store(resolve(str(home)))
    yield opened
    opened.close()


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC)
    (tmp_path / "x.npy").touch()
    return path


def test_submit_and_wait(home: Path, store: Store, spec: Path) -> None:
    """What the spec says goes to the queue; arguments and overrides go before it."""
    job = nimble_jobs.submit(spec, home=home)
    assert (job.name, job.state, job.priority, job.timeout_s) == ("tiny", JobState.QUEUED, 3, 7200.0)
    assert (job.device, job.max_attempts) == ("cpu", 7)
    other = client.submit(
        spec, home=home, overrides=["name=other"], priority=0, after=["tiny"], delay_s=60, key="k", now=1000.0
    )
    assert (other.name, other.priority, other.after, other.not_before) == ("other", 0, (job.id,), 1060.0)
    assert client.submit(spec, store=store, overrides=["name=other"], key="k").id == other.id
    with pytest.raises(NotFinishedInTime, match=job.id):
        nimble_jobs.wait(job.id, home=home, timeout_s=0)
    client.cancel(job.id, store=store)
    assert [j.state for j in nimble_jobs.wait([job.id, other.id], home=home)] == [JobState.CANCELLED] * 2
    assert {j.id for j in client.list_jobs(home=home)} == {job.id, other.id}


def test_what_cannot_be_submitted(home: Path, spec: Path) -> None:
    """Nothing is queued for a bad spec, an unknown job, a folder that is none, or overrides of a finished spec."""
    with pytest.raises(SpecError):
        client.submit(spec, home=home, overrides=["kind=dance"])
    with pytest.raises(NotFound, match="nobody"):
        client.submit(spec, home=home, after=["nobody"])
    with pytest.raises(UsageError, match="not a folder"):
        client.submit(spec, home=home, allow_python=[spec])
    with pytest.raises(UsageError, match="overrides"):
        client.submit(load(spec), home=home, overrides=["name=x"])
    assert client.list_jobs(home=home) == []


def test_allowed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders come from the argument and from the environment, each once."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setenv("NIMBLE_JOBS_ALLOW_PYTHON", f"{tmp_path / 'b'}::{tmp_path / 'a'}")
    assert client.allowed_python([tmp_path / "a"], settings=read_settings(tmp_path)) == (tmp_path / "a", tmp_path / "b")


def test_cancel_now(store: Store, spec: Path) -> None:
    """A running job is asked, or ended at once; its attempt then owns nothing any more."""
    job = client.submit(spec, store=store)
    claimed = store.jobs.claim("w", device="cpu", now=time.time())
    assert claimed
    (asked,) = client.cancel(job.id, store=store)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    (ended,) = client.cancel([job.id], store=store, now=True)
    assert ended.state is JobState.CANCELLED
    assert not store.jobs.progress(job.id, claimed.attempt, done=1, total=None, bad=0)


def test_a_detached_worker(home: Path, store: Store) -> None:
    """It returns when the worker is ready; the worker is in its own session, and stops when told to."""
    (info,) = client.start_worker(home, device="cpu", max_idle_s=60)
    try:
        assert (info.device, info.status) == ("cpu", "ready")
        assert [i.id for i in client.live_workers(home=home)] == [info.id]
        session = Path(f"/proc/{info.pid}/stat").read_text().rpartition(")")[2].split()[3]
        assert int(session) == info.pid
    finally:
        (stopped,) = client.stop_workers(home=home, timeout_s=PATIENCE_S)
    assert stopped.id == info.id
    assert client.live_workers(home=home) == []


def test_a_detached_worker_that_cannot_start(home: Path) -> None:
    """The end of its log says why."""
    with pytest.raises(UsageError, match="cuda:99 is not available"):
        client.start_worker(home, device="cuda:99")
    assert client.live_workers(home=home) == []


def test_imports_stay_cheap() -> None:
    """Neither package, client nor supervisor loads torch; the package alone loads nothing of ours but its version."""
    code = (
        "import sys, nimble_jobs\n"
        "assert {m for m in sys.modules if m.startswith('nimble_jobs')} == {'nimble_jobs', 'nimble_jobs.version'}\n"
        "import nimble_jobs.client, nimble_jobs.worker.serve, nimble_jobs.worker.__main__\n"
        "assert 'torch' not in sys.modules and 'typer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError):
        nimble_jobs.nothing  # noqa: B018
