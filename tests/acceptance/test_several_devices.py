"""A worker with several devices: one supervisor and a real child process for each. The jobs are fakes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest
from several_devices import stop
from worker_fakes import submit
from worker_processes import Start, ended, noted

from nimble_jobs import client, control
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, Wanted
from nimble_jobs.views import waits
from tests import zygote
from tests.waiting import PATIENCE_S, until


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that run jobs."""
    return zygote.spawned(process.pid)


def ready(store: Store, count: int) -> list[str]:
    """The ids of the devices, once so many are ready."""
    until(lambda: sum(info.status == "ready" for info in store.workers.live()) == count)
    return [info.id for info in store.workers.live()]


def test_two_devices_work_at_the_same_time(store: Store, start: Start, tmp_path: Path) -> None:
    """Two jobs run side by side in two processes of one worker, which has an id for each device and leaves with 0."""
    jobs = [submit(store, tmp_path, name=n, do="batches", gate=str(tmp_path / "gate")) for n in ("a", "b")]
    worker = start(device="cpu,cpu", idle=0.5)
    until(lambda: noted(tmp_path, "a") and noted(tmp_path, "b"))
    live = store.workers.live()
    assert {info.pid for info in live} == {worker.pid}
    assert {job.worker for job in store.jobs.running()} == {info.id for info in live}
    (tmp_path / "gate").touch()
    assert [job.state for job in ended(store, *jobs)] == [JobState.SUCCEEDED] * 2
    assert noted(tmp_path, "a")[0][1] != noted(tmp_path, "b")[0][1]
    assert worker.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize("how", ["die", "fault"])
def test_one_that_dies_or_faults_leaves_the_other_at_work(store: Store, start: Start, tmp_path: Path, how: str) -> None:
    """Its child is started again and runs its job again; the other job and its process notice nothing."""
    steady = submit(store, tmp_path, name="steady", do="batches", gate=str(tmp_path / "gate"))
    start(device="cpu,cpu")
    until(lambda: noted(tmp_path, "steady"))
    broken = submit(store, tmp_path, name="broken", do=how, times=1)
    (again,) = ended(store, broken)
    assert (again.state, again.attempt) == (JobState.SUCCEEDED, 2)
    assert len({process for _, process, _ in noted(tmp_path, "broken")}) == 2
    (tmp_path / "gate").touch()
    (done,) = ended(store, steady)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 1)
    assert len(ready(store, 2)) == 2


def test_a_device_is_lent_to_a_job_of_the_other(store: Store, start: Start, tmp_path: Path) -> None:
    """Its process is gone while that job runs, other jobs wait, and both devices work again after it."""
    job = submit(store, tmp_path, name="two", do="batches", borrow=1, gate=str(tmp_path / "gate"))
    worker = start(device="cpu,cpu")
    until(lambda: "lent" in [what for *_, what in noted(tmp_path, "two")])
    assert len(children_of(worker)) == 1
    behind = submit(store, tmp_path, name="behind", do="batches")
    assert sorted(info.status for info in store.workers.live()) == ["lent", "ready"]
    assert waits.reasons(store, [store.jobs.get(behind.id)], time.time()) == {behind.id: "all 2 workers are busy"}
    (tmp_path / "gate").touch()
    assert [done.state for done in ended(store, job, behind)] == [JobState.SUCCEEDED] * 2
    assert len(ready(store, 2)) == 2


def test_sigterm_gives_all_jobs_back(store: Store, start: Start, tmp_path: Path) -> None:
    """Both jobs stop at their next safe point and are queued; exit 0."""
    gate = str(tmp_path / "gate")  # which is never there
    jobs = [submit(store, tmp_path, name=n, do="batches", count=2, gate=gate) for n in ("a", "b")]
    worker = start(device="cpu,cpu")
    until(lambda: noted(tmp_path, "a") and noted(tmp_path, "b"))
    worker.terminate()
    assert worker.wait(timeout=PATIENCE_S) == 0
    for job in jobs:
        assert store.jobs.get(job.id).state is JobState.QUEUED
        assert [a.outcome for a in store.jobs.attempts(job.id)] == ["requeued"]


def test_one_device_is_stopped_by_a_signal(store: Store, start: Start, tmp_path: Path) -> None:
    """A stopped child holds its own job only: the other device takes the jobs behind it."""
    held = submit(store, tmp_path, name="held", do="batches", gate=str(tmp_path / "gate"), stall="6s")
    start(device="cpu,cpu")
    until(lambda: noted(tmp_path, "held"))
    stop(store, psutil.Process(int(noted(tmp_path, "held")[0][1])))
    others = [submit(store, tmp_path, name=f"other-{i}", do="batches") for i in range(3)]
    assert [job.state for job in ended(store, *others)] == [JobState.SUCCEEDED] * 3
    until(lambda: [a.outcome for a in store.jobs.attempts(held.id)][:1] == ["stalled"])


def test_orders_name_a_device(store: Store, start: Start, tmp_path: Path) -> None:
    """A paused device takes no jobs; a drained one leaves while the other works; with the last one the worker ends."""
    worker = start(device="cpu,cpu")
    first, second = ready(store, 2)
    control.ask(store, Wanted.PAUSE, [first])
    paused = [info for info in store.workers.live() if info.id == first]
    assert control.answered(store, paused, timeout_s=PATIENCE_S)
    job = submit(store, tmp_path, name="a", do="batches")
    assert ended(store, job)[0].worker == second
    control.ask(store, Wanted.DRAIN, [second])
    until(lambda: [info.id for info in store.workers.live()] == [first])
    assert len(children_of(worker)) == 1
    control.ask(store, Wanted.DRAIN, [first])
    assert worker.wait(timeout=PATIENCE_S) == 0


def test_stopping_one_device_stops_its_worker(store: Store, start: Start) -> None:
    """SIGTERM reaches the process, so all of its devices are waited for."""
    worker = start(device="cpu,cpu")
    first, second = ready(store, 2)
    assert [info.id for info in client.stop_workers([second], store=store)] == [first, second]
    assert worker.wait(timeout=PATIENCE_S) == 0


def test_a_device_that_is_not_there_beside_one_that_is(store: Store, start: Start, tmp_path: Path) -> None:
    """A mistake in the list ends the worker; a job that the other device has begun is back in the queue."""
    job = submit(store, tmp_path, do="batches", count=2, gate=str(tmp_path / "gate"))
    worker = start(device="cpu,cuda:9")
    assert worker.wait(timeout=PATIENCE_S) != 0
    assert "cuda:9 does not exist" in (tmp_path / "worker-0.log").read_text()
    assert store.jobs.get(job.id).state is JobState.QUEUED


def test_a_killed_supervisor_takes_all_children_along(store: Store, start: Start, tmp_path: Path) -> None:
    """The next worker finds both jobs."""
    gate = str(tmp_path / "gate")
    jobs = [submit(store, tmp_path, name=n, do="batches", count=2, gate=gate) for n in ("a", "b")]
    worker = start(device="cpu,cpu")
    until(lambda: noted(tmp_path, "a") and noted(tmp_path, "b"))
    children = children_of(worker)
    worker.kill()
    worker.wait()
    until(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children))
    start(device="cpu,cpu")
    until(lambda: all([a.outcome for a in store.jobs.attempts(job.id)] == ["lost", None] for job in jobs))
