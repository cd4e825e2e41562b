"""A worker of real processes under real signals. The jobs are fakes; their effects are files and rows."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from several_devices import stop
from worker_fakes import submit
from worker_processes import Start, child_of, ended, noted

from nimble_jobs import client
from nimble_jobs.errors import NotFinishedInTime, NotFound
from nimble_jobs.job import JobState
from nimble_jobs.store import Store
from tests.waiting import PATIENCE_S, until


def test_jobs_flow(store: Store, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small jobs run one after another in one process, none of which waits until the worker looks for jobs again;
    an idle worker leaves with 0; the log tells the story.
    """
    monkeypatch.setenv("FAKES_POLL_S", "600")
    jobs = [submit(store, tmp_path, name=f"job-{i}", do="print") for i in range(50)]
    worker = start(idle=0.5)
    assert worker.wait(timeout=PATIENCE_S) == 0
    done = ended(store, *jobs)
    assert [job.state for job in done] == [JobState.SUCCEEDED] * 50
    assert done[0].outputs == {"path": "out"}
    assert {name: v for name, v in done[0].timings.items() if name != "phases"} == {"run_s": 0.5}
    assert [each["phase"] for each in done[0].timings["phases"]] == ["run", "publish"]
    assert (done[0].records_done, done[0].records_total) == (1, 1)
    assert len({noted(tmp_path, f"job-{i}")[0][1] for i in range(50)}) == 1
    log = (store.home / "logs" / f"{jobs[0].id}.log").read_text()
    assert "attempt 1" in log
    assert "succeeded" in log
    assert store.workers.live() == []


def test_progress_is_seen_while_a_job_runs(store: Store, start: Start, tmp_path: Path) -> None:
    """Other processes see counts and phase change while the job runs."""
    job = submit(store, tmp_path, do="batches", count=100, sleep_s=0.05)
    start()
    seen = until(lambda: (found := store.jobs.get(job.id)).records_done > 3 and found)
    assert (seen.state, seen.phase, seen.records_total) == (JobState.RUNNING, "run", 100)


@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_child_is_replaced_and_its_job_runs_again(
    store: Store, start: Start, tmp_path: Path, times: int
) -> None:
    """SIGKILL of the child during a job costs one attempt, not the job."""
    job = submit(store, tmp_path, do="die", times=times)
    start()
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["lost"] * times + ["succeeded"]
    assert len({process for _, process, _ in noted(tmp_path)}) == times + 1


def test_a_job_that_kills_every_child_is_quarantined(store: Store, start: Start, tmp_path: Path) -> None:
    """After max_attempts deaths the job is quarantined with the reason, and the next job runs."""
    job, next_job = submit(store, tmp_path, do="die", times=99), submit(store, tmp_path, name="next", do="batches")
    start()
    done, other = ended(store, job, next_job)
    assert done.state is JobState.QUARANTINED
    assert "SIGKILL" in (done.error or "")
    assert done.attempt == 3
    assert other.state is JobState.SUCCEEDED


def test_a_device_fault_ends_the_process(store: Store, start: Start, tmp_path: Path) -> None:
    """After a device fault the job is tried again in a new process: the faulted context runs nothing any more."""
    job = submit(store, tmp_path, do="fault")
    start()
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["failed", "succeeded"]
    (_, faulted, _), (_, fresh, _), _ = noted(tmp_path)
    assert faulted != fresh


def test_failures_say_why_and_keep_the_process(store: Store, start: Start, tmp_path: Path) -> None:
    """Errors fail the job at once with a reason; a traceback goes to its log; the process goes on."""
    jobs = [
        submit(store, tmp_path, name="data", do="raise", error="data"),
        submit(store, tmp_path, name="bug", do="raise", error="bug"),
        submit(store, tmp_path, name="exit", do="exit"),
        submit(store, tmp_path, name="good", do="batches"),
    ]
    start()
    data, bug, left, good = ended(store, *jobs)
    assert (data.state, data.error, data.attempt) == (JobState.FAILED, "no such file", 1)
    assert (bug.state, bug.error, bug.attempt) == (JobState.FAILED, "KeyError: 'weights'", 1)
    assert (left.state, left.error) == (JobState.FAILED, "SystemExit: 3")
    assert good.state is JobState.SUCCEEDED
    assert "Traceback" in (store.home / "logs" / f"{bug.id}.log").read_text()
    assert len({noted(tmp_path, name)[0][1] for name in ("data", "bug", "exit", "good")}) == 1


def test_a_killed_supervisor_takes_its_child_along(store: Store, start: Start, tmp_path: Path) -> None:
    """SIGKILL of the supervisor ends the child too; the next worker finds the job and runs it."""
    job = submit(store, tmp_path, do="hang")
    worker = start()
    until(lambda: noted(tmp_path))
    child = child_of(worker)
    worker.kill()
    worker.wait()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert store.workers.live() == []
    start()
    until(lambda: len(noted(tmp_path)) == 2)
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["lost", None]


def test_another_worker_recovers_lost_jobs(store: Store, start: Start, tmp_path: Path) -> None:
    """A worker that runs already finds the job of one that was killed."""
    workers = {process.pid: process for process in (start(), start())}
    until(lambda: sum(info.status == "ready" for info in store.workers.live()) == 2)
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    until(lambda: noted(tmp_path))
    holder = store.jobs.get(job.id).worker
    (pid,) = [info.pid for info in store.workers.live() if info.id == holder]
    workers[pid].kill()
    until(lambda: store.jobs.attempts(job.id)[0].outcome)
    (tmp_path / "gate").touch()
    (done,) = ended(store, job)
    assert done.state is JobState.SUCCEEDED
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["lost", "succeeded"]
    assert done.worker != holder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_worker_gives_its_job_back(store: Store, start: Start, tmp_path: Path, number: int) -> None:
    """SIGTERM or SIGINT: the job stops at its next safe point and is queued; exit 0; nothing counts as a failure."""
    gate = str(tmp_path / "gate")  # which is never there
    job, waiting = (submit(store, tmp_path, name=n, do="batches", count=2, gate=gate) for n in ("a", "b"))
    worker = start()
    until(lambda: noted(tmp_path, "a"))
    worker.send_signal(number)
    assert worker.wait(timeout=PATIENCE_S) == 0
    found = store.jobs.get(job.id)
    assert (found.state, found.attempt, found.not_before <= time.time()) == (JobState.QUEUED, 1, True)
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["requeued"]
    assert noted(tmp_path, "a")[-1][2] == "stop drain"
    assert store.jobs.get(waiting.id).attempt == 0


def test_a_terminal_interrupt_reaches_everybody_and_loses_nothing(store: Store, start: Start, tmp_path: Path) -> None:
    """Ctrl-C goes to the child as well; it must not die of it."""
    job = submit(store, tmp_path, do="batches", count=2, gate=str(tmp_path / "gate"))
    worker = start()
    until(lambda: noted(tmp_path))
    child_of(worker).send_signal(signal.SIGINT)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["requeued"]


@pytest.mark.parametrize("second_signal", [True, False])
def test_the_grace_period_ends(store: Store, start: Start, tmp_path: Path, second_signal: bool) -> None:
    """A job that does not stop is queued again when the grace period is over, or at a second signal."""
    job = submit(store, tmp_path, do="hang")
    worker = start(grace=600 if second_signal else 1)
    until(lambda: noted(tmp_path))
    worker.terminate()
    if second_signal:
        until(lambda: "asked to stop" in (tmp_path / "worker-0.log").read_text())  # or the signals could become one
        worker.terminate()
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert store.jobs.get(job.id).state is JobState.QUEUED
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["requeued"]


def test_cancel_between_batches(store: Store, start: Start, tmp_path: Path) -> None:
    """A running job stops at its next batch; the process stays."""
    job = submit(store, tmp_path, name="a", do="batches", count=2, gate=str(tmp_path / "gate"))
    other = submit(store, tmp_path, name="b", do="batches")
    start()
    until(lambda: noted(tmp_path, "a"))
    assert client.cancel(job.id, store=store)[0].state is JobState.RUNNING
    done, second = ended(store, job, other)
    assert (done.state, second.state) == (JobState.CANCELLED, JobState.SUCCEEDED)
    assert noted(tmp_path, "a")[-1][2] == "stop cancel"
    assert noted(tmp_path, "a")[0][1] == noted(tmp_path, "b")[0][1]


def test_cancel_now_kills_what_does_not_stop(store: Store, start: Start, tmp_path: Path) -> None:
    """`cancel --now` ends a job that never asks; the next job runs in a new process."""
    job, other = submit(store, tmp_path, name="a", do="hang"), submit(store, tmp_path, name="b", do="batches")
    start()
    until(lambda: noted(tmp_path, "a"))
    assert client.cancel(job.id, store=store, now=True)[0].state is JobState.CANCELLED
    assert ended(store, other)[0].state is JobState.SUCCEEDED
    assert noted(tmp_path, "a")[0][1] != noted(tmp_path, "b")[0][1]
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["cancelled"]


def test_cancel_ends_a_job_that_blocks_in_a_read(store: Store, start: Start, tmp_path: Path) -> None:
    """A read that never returns costs the grace period, not the worker: the next job runs in a new process."""
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # it opens, and then nothing comes
    job = submit(store, tmp_path, name="a", do="read", path=str(tmp_path / "pipe"))
    other = submit(store, tmp_path, name="b", do="batches")
    start()
    until(lambda: noted(tmp_path, "a"))
    assert client.cancel(job.id, store=store)[0].state is JobState.RUNNING
    done, second = ended(store, job, other)
    os.close(writer)
    assert (done.state, second.state) == (JobState.CANCELLED, JobState.SUCCEEDED)
    assert [a.outcome for a in store.jobs.attempts(job.id)] == ["cancelled"]
    assert noted(tmp_path, "a")[0][1] != noted(tmp_path, "b")[0][1]


@pytest.mark.parametrize("end", ["quarantined", "failed", "timed out", "cancelled", "cancelled now", "while queued"])
def test_nothing_stays_beside_the_output(store: Store, start: Start, tmp_path: Path, end: str) -> None:
    """What a job staged is removed when it is over, also where the process that staged it was killed."""
    hang = {"do": "hang", "stage": True}
    match end:
        case "quarantined":
            job = submit(store, tmp_path, do="die", times=9, stage=True)
        case "failed":
            job = submit(store, tmp_path, do="raise", error="data", stage=True)
        case "timed out":
            job = submit(store, tmp_path, timeout_s=0.5, **hang)
        case "while queued":
            job = submit(store, tmp_path, do="die", times=1, stage=True, retry_s=600)
        case _:
            job = submit(store, tmp_path, **hang)
    start()
    if end.startswith("cancelled"):
        until(lambda: noted(tmp_path))
        client.cancel(job.id, store=store, now=end == "cancelled now")
    if end == "while queued":
        until(lambda: (now := store.jobs.get(job.id)).state is JobState.QUEUED and now.attempt)
        assert (tmp_path / f".fake.{job.id}").exists()
        client.cancel(job.id, store=store)
    (done,) = ended(store, job)
    assert done.state == {"timed out": "failed"}.get(end, end.split()[0] if end != "while queued" else "cancelled")
    until(lambda: not (tmp_path / f".fake.{job.id}").exists())


def test_nothing_stays_of_a_killed_run(store: Store, tmp_path: Path) -> None:
    """Whichever command looks next gives the job up and removes what it staged."""
    job = submit(store, tmp_path, do="hang", foreground=True)
    with store.workers.hold({"role": "run"}) as lease:
        assert store.jobs.claim_foreground(job.id, lease.id, time.time()) is not None
    staged = tmp_path / f".fake.{job.id}" / "attempt-1"
    staged.mkdir(parents=True)
    (staged / "part-00000.jsonl").touch()
    client.recover(store)
    assert store.jobs.get(job.id).state is JobState.FAILED
    assert not staged.parent.exists()


def test_timeout(store: Store, start: Start, tmp_path: Path) -> None:
    """A job stops at its timeout and fails, once, saying so."""
    job = submit(store, tmp_path, do="batches", count=400, sleep_s=0.05, timeout_s=1.0)
    start()
    (done,) = ended(store, job)
    assert (done.state, done.error, done.attempt) == (JobState.FAILED, "timed out after 1s", 1)


def test_a_job_that_ignores_its_timeout_is_killed(store: Store, start: Start, tmp_path: Path) -> None:
    """A while later the supervisor kills the process; the job has failed, and is not tried again."""
    job = submit(store, tmp_path, do="hang", timeout_s=0.5)
    start()
    (done,) = ended(store, job)
    assert (done.state, done.error, done.attempt) == (JobState.FAILED, "timed out after 500ms", 1)


def test_a_device_that_is_not_there(store: Store, start: Start, tmp_path: Path) -> None:
    """The worker says so and exits with 2; the job stays queued."""
    job = submit(store, tmp_path, do="batches")
    worker = start(device="cuda:9")
    assert worker.wait(timeout=PATIENCE_S) != 0
    assert "cuda:9 does not exist" in (tmp_path / "worker-0.log").read_text()
    assert store.jobs.get(job.id).state is JobState.QUEUED


def test_children_that_never_come_up(store: Store, start: Start, tmp_path: Path) -> None:
    """After five children that died at their start the worker gives up and says how the last one ended."""
    job = submit(store, tmp_path, do="batches")
    worker = start(target="dies")
    assert worker.wait(timeout=PATIENCE_S) != 0
    assert "5 child processes in a row died before they were ready, the last one: killed by SIGKILL" in (
        (tmp_path / "worker-0.log").read_text()
    )
    assert store.jobs.get(job.id).attempt == 0


def test_an_idle_worker_waits_for_a_retry(store: Store, start: Start, tmp_path: Path) -> None:
    """A job that waits for its next attempt keeps the worker, however short its idle time."""
    job = submit(store, tmp_path, do="die", times=1, retry_s=3.0)
    worker = start(idle=0.3)
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert store.jobs.get(job.id).state is JobState.SUCCEEDED


def test_stop_workers(store: Store, start: Start, tmp_path: Path) -> None:
    """`stop_workers` returns when the workers are gone; it names those that run not, or too long."""
    job = submit(store, tmp_path, do="hang")
    worker = start(grace=600)
    until(lambda: noted(tmp_path))
    (info,) = client.live_workers(store=store)
    assert info.pid == worker.pid
    with pytest.raises(NotFound, match="nobody"):
        client.stop_workers(["nobody"], store=store)
    with pytest.raises(NotFinishedInTime, match=info.id):
        client.stop_workers([info.id], store=store, timeout_s=0.1)
    until(lambda: "asked to stop" in (tmp_path / "worker-0.log").read_text())
    client.stop_workers(store=store)  # the second signal, at which the job is not waited for
    assert worker.wait(timeout=PATIENCE_S) == 0
    assert client.live_workers(store=store) == []
    assert store.jobs.get(job.id).state is JobState.QUEUED


def test_a_paused_worker_keeps_its_job(store: Store, start: Start, tmp_path: Path) -> None:
    """SIGSTOP is not death: the lock is held, nobody takes the job, and it goes on after SIGCONT."""
    job = submit(store, tmp_path, do="batches", gate=str(tmp_path / "gate"))
    worker = start()
    until(lambda: noted(tmp_path))
    processes = [psutil.Process(worker.pid), child_of(worker)]
    for process in processes:
        stop(store, process)
    start()
    until(lambda: sum(info.status == "ready" for info in store.workers.live()) == 1 and len(store.workers.live()) == 2)
    time.sleep(1.0)
    assert store.jobs.get(job.id).attempt == 1
    for process in processes:
        process.send_signal(signal.SIGCONT)
    (tmp_path / "gate").touch()
    (done,) = ended(store, job)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 1)
