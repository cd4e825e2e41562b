"""Trouble of disk and database that passes: real workers wait, say so, go on, and lose nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from faults import full, locked
from worker_fakes import submit
from worker_processes import Start, child_of, ended, noted

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.waiting import PATIENCE_S, until

# How long each trouble lasts, from the moment that a job is known to wait for its end: four seconds, or two minutes.
HELD_S = float(os.environ["NIMBLE_JOBS_TROUBLE_S"])
TIMEOUT_S = 15.0  # far more than a job needs that does not wait, on busy cores too


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, with the store on it."""
    yield from small_disk(tmp_path / "disk")


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, without the store."""
    yield from small_disk(tmp_path / "outputs")


def small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(path)], check=False)
    if mounted.returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """On the small disk where the test has one."""
    folder = request.getfixturevalue("disk") if "disk" in request.fixturenames else tmp_path
    with open_store(resolve(str(folder / "home"))) as opened:
        yield opened


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder is mounted read-only inside the block; files that are open stay as they are."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def no_writes(*pids: int) -> Iterator[None]:
    """Every write of these processes to a file fails inside the block. Needs no mount and no privilege."""
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    for pid, (_, hard) in zip(pids, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        for pid, limits in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def log_of(folder: Path) -> str:
    """What the first worker and its child have logged."""
    return (folder / "worker-0.log").read_text()


def running(store: Store, job: Job) -> None:
    until(lambda: store.jobs.get(job.id).phase == "run")


def check_undisturbed(store: Store, folder: Path, *jobs: Job) -> None:
    """Each succeeded in one attempt, all in one process, and the store is sound."""
    for job in ended(store, *jobs):
        assert job.state is JobState.SUCCEEDED, job.error
        assert [a.outcome for a in store.jobs.attempts(job.id)] == ["succeeded"]
    assert len({process for job in jobs for _, process, _ in noted(folder, job.name)}) == 1
    assert store.check() == []


@pytest.mark.parametrize("trouble", ["full", "locked", "read-only", "no writes"])
def test_a_busy_worker_waits(store: Store, disk: Path, start: Start, tmp_path: Path, trouble: str) -> None:
    """While the store can be written by nobody a job runs on; its end is written afterwards, and the next job runs."""
    gate = tmp_path / "gate"
    job = submit(store, tmp_path, do="batches", gate=str(gate))
    next_job = submit(store, tmp_path, name="next", do="batches")
    worker = start()
    running(store, job)
    child = child_of(worker).pid
    held = {
        "full": lambda: full(disk),
        "locked": lambda: locked(store),
        "read-only": lambda: read_only(store.home),
        "no writes": lambda: no_writes(child),
    }[trouble]
    with ExitStack() as troubles:
        troubles.enter_context(held())
        gate.touch()  # now the job does its work
        if trouble == "no writes":  # of which its log is a victim as well
            until(lambda: store.workers.live()[0].info.get("waits_for"))
            troubles.enter_context(no_writes(worker.pid))
        else:
            until(lambda: "WARNING waiting until this works again" in log_of(tmp_path))
        time.sleep(HELD_S)
        assert worker.poll() is None
    check_undisturbed(store, tmp_path, job, next_job)
    assert "the wait is over; the job continues" in log_of(tmp_path)
    assert "attempt 1 succeeded" in (store.home / "logs" / f"{job.id}.log").read_text()


@pytest.mark.parametrize("trouble", ["full", "locked"])
def test_an_idle_worker_waits(store: Store, disk: Path, start: Start, tmp_path: Path, trouble: str) -> None:
    """A worker that claims while the store refuses stays, and takes what is submitted afterwards."""
    first = submit(store, tmp_path, do="batches")
    worker = start()
    ended(store, first)
    with full(disk) if trouble == "full" else locked(store):
        time.sleep(HELD_S)
        assert worker.poll() is None
    check_undisturbed(store, tmp_path, first, submit(store, tmp_path, name="next", do="batches"))


def test_a_child_that_dies_meanwhile_is_replaced(store: Store, disk: Path, start: Start, tmp_path: Path) -> None:
    """What the supervisor could not write, that an attempt was lost, is written once that is possible."""
    job = submit(store, tmp_path, do="hang")
    worker = start()
    until(lambda: noted(tmp_path))
    with full(disk):
        child_of(worker).kill()
        time.sleep(3)
        assert worker.poll() is None
    until(lambda: store.jobs.get(job.id).attempt == 2)
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["lost", None]


def test_sigterm_while_it_waits(store: Store, start: Start, tmp_path: Path) -> None:
    """A worker that cannot write leaves within its grace period; the next one finds the job and runs it."""
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    worker = start(grace=2)
    running(store, job)
    with locked(store):
        (tmp_path / "gate").touch()
        until(lambda: len(noted(tmp_path)) == 2)  # its work is done, and waits to be written
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=PATIENCE_S) == 0
    start()
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED
    assert done.attempt == 2


def test_patience_has_an_end(
    store: Store, disk: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIMBLE_JOBS_PATIENCE bounds the wait; the worker then leaves with an error that names what was full."""
    monkeypatch.setenv("NIMBLE_JOBS_PATIENCE", "2s")
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    worker = start()
    running(store, job)
    with full(disk):
        (tmp_path / "gate").touch()
        assert worker.wait(timeout=PATIENCE_S) != 0
    assert "no space left" in log_of(tmp_path)
    monkeypatch.setenv("NIMBLE_JOBS_PATIENCE", "1h")
    start()
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED


@pytest.mark.parametrize(("trouble", "said"), [(full, "No space left"), (read_only, "Read-only file system")])
def test_shards_wait_for_the_outputs_disk(
    store: Store,
    outputs: Path,
    start: Start,
    tmp_path: Path,
    trouble: Callable[[Path], AbstractContextManager[None]],
    said: str,
) -> None:
    """A job that cannot write its output says that it waits, and its shards are written afterwards, each once."""
    gate = tmp_path / "gate"
    job = submit(store, tmp_path, do="shards", path=str(outputs / "out"), count=6, gate=str(gate))
    start()
    running(store, job)
    with trouble(outputs):
        gate.touch()
        until(lambda: store.jobs.get(job.id).phase == "wait")
        until(lambda: said in (store.workers.live()[0].info.get("waits_for") or ""))
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED
    assert done.attempt == 1
    assert len(list((outputs / "out").glob("part-*.logits.npy"))) == 6


@pytest.mark.parametrize("way", ["cancel", "stop", "timeout"])
def test_a_wait_for_a_disk_can_be_ended(store: Store, start: Start, tmp_path: Path, way: str) -> None:
    """A job that waits for the disk of its output obeys `cancel` and SIGTERM; its timeout does not run meanwhile."""
    (tmp_path / "outputs").mkdir()
    job = submit(
        store,
        tmp_path,
        do="shards",
        path=str(tmp_path / "outputs" / "out"),
        count=6,
        gate=str(tmp_path / "gate"),
        timeout_s=TIMEOUT_S if way == "timeout" else None,
    )
    worker = start(grace=30)
    running(store, job)
    child = child_of(worker).pid
    # The supervisor can write, and so can the child to its pipes; regular files of the child cannot grow.
    with no_writes(child):
        (tmp_path / "gate").touch()
        until(lambda: store.workers.live()[0].info.get("waits_for"))
        if way == "cancel":
            client.cancel(job.id, store=store)
            time.sleep(1)
        elif way == "stop":
            worker.send_signal(signal.SIGTERM)
            time.sleep(1)
        else:
            time.sleep(TIMEOUT_S + 2)  # the supervisor would end it a second after its timeout
    (done,) = (
        ended(store, job) if way != "stop" else [until(lambda: worker.poll() is not None and store.jobs.get(job.id))]
    )
    wanted = {"cancel": JobState.CANCELLED, "stop": JobState.QUEUED, "timeout": JobState.SUCCEEDED}
    assert done.state is wanted[way], done.error
    assert len(store.jobs.attempts(job.id)) == 1
