"""One worker with several devices, the jobs that bench_devices.py gives it, and what is done to its processes."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from nimble_jobs import client
from nimble_jobs.job import Job, JobState, Member
from nimble_jobs.store import Store
from nimble_jobs.store.home import DATABASE

_PATIENCE_S = 120.0
_READY_S = 180.0
_JOB_S = 400.0
_POLL_S = 0.02
_STEADY = (0.1, 0.9)  # the part of the records over which the steady rate is measured
_FEWEST = 8  # samples in it
Disturb = Callable[[], str]  # does it, and says what was done
Sample = tuple[float, int]  # when, in seconds, and how many records were done


class Host:
    """A worker, and the store that its jobs are in."""

    def __init__(self, store: Store, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.store, self.folder = store, folder
        self._process = process
        self.count = 0  # devices; known once they are ready

    def ready(self) -> None:
        """Wait until every device can take a job, and no process of them is stopped. Sets `count`."""
        deadline = time.monotonic() + _READY_S
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"the worker ended with {self._process.returncode}; see its log")
            live = self.store.workers.live("worker")
            stopped = [child for child in self.children() if child.status() == psutil.STATUS_STOPPED]
            all_there = len(live) == len(self.children()) > 0 and len(live) >= self.count
            if all_there and not stopped and all(info.status == "ready" for info in live):
                self.count = len(live)
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"after {_READY_S:g} s: {[(info.device, info.status) for info in live]}")
            time.sleep(_POLL_S)

    def children(self) -> list[psutil.Process]:
        """The processes of the devices, the oldest first."""
        found = []
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    if child.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(child.cmdline()):
                        found.append(child)
        return sorted(found, key=lambda child: child.create_time())

    def score(self, spec: Path, disturb: Disturb | None = None) -> dict[str, Any]:
        """Run a job to its end; its figures. With `disturb`, something happens to it after a third of its records."""
        self.ready()
        devices = {info.id: info.device for info in self.store.workers.live("worker")}
        before = self._cpu_s()
        job = client.submit(spec, store=self.store, allow_python=[self.folder])
        deadline, samples, done = time.monotonic() + _JOB_S, list[Sample](), None
        while not (now := self.store.jobs.get(job.id)).state.final:
            if not samples or samples[-1][1] != now.records_done:
                samples.append((time.monotonic(), now.records_done))
            if disturb is not None and done is None and self._under_way(now):
                done = disturb()
            if time.monotonic() > deadline:
                raise SystemExit(f"{now.name} did not end in {_JOB_S:g} s")
            time.sleep(_POLL_S)
        spent_s = sum(cpu_s - before.get(process, 0.0) for process, cpu_s in self._cpu_s().items())
        found = self._figures(now) | {
            "steady_records_per_s": _steady(samples, now.records_done),
            "cores_busy": round(spent_s / _wall_s(now), 1),
            "device": devices.get(now.worker or ""),  # of several: the leader's
        }
        if disturb is not None:
            found["disturbed"] = done
        return found

    def _under_way(self, job: Job) -> bool:
        """Whether all devices have scored something, and a third is done."""
        scored = [member.records_done for member in self.store.shards.members(job.id)]
        return len(scored) == self.count and all(scored) and sum(scored) * 3 >= (job.records_total or 0) > 0

    def kill(self) -> str:
        """End the process of one device at once."""
        child = self.children()[-1]
        child.kill()
        return f"SIGKILL to process {child.pid}"

    def stop(self) -> str:
        """Stop the process of one device while it does not hold the database's lock: all others would wait for that."""
        child = self.children()[-1]
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            child.send_signal(signal.SIGSTOP)
            while child.status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            with closing(sqlite3.connect(self.store.home / DATABASE, timeout=0.2)) as connection:
                try:
                    connection.execute("BEGIN EXCLUSIVE")
                except sqlite3.OperationalError:
                    child.send_signal(signal.SIGCONT)
                    time.sleep(0.05)
                else:
                    return f"SIGSTOP to process {child.pid}"
        raise SystemExit("the process held the database's lock each time it was stopped")

    def fault(self) -> str:
        """Have the next batch of any device fault."""
        (self.folder / "fault").touch()
        return "device-side assertion"

    def _cpu_s(self) -> dict[tuple[int, float], float]:
        """CPU seconds of the worker's living processes. What those that end meanwhile have used is not counted."""
        found = {}
        root = psutil.Process(self._process.pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
        return found

    def _figures(self, job: Job) -> dict[str, Any]:
        timings, schedule = job.timings, job.schedule
        wall_s, rate = _wall_s(job), timings.get("records_per_s")
        events = self.store.jobs.events(job.id)
        return {
            "state": job.state.value,
            "error": job.error,
            "attempt": job.attempt,
            "records": job.records_done,
            "records_bad": job.records_bad,
            "hit": schedule.get("hit"),
            "runs": schedule.get("runs"),
            "replay_us": schedule.get("replay_us"),
            "wall_s": round(wall_s, 3),  # from being queued to being published
            "records_per_s": rate and round(rate, 1),  # of several: from the first to join to the last shard
            "wall_records_per_s": round(job.records_done / wall_s, 1),
            "fixed_s": rate and round(wall_s - job.records_done / rate, 3),
            "stages": {stage["name"]: stage["busy"] for stage in timings.get("stages") or ()},  # of the leader
            "bottleneck": timings.get("bottleneck"),
            "copies": sum(event.kind == "copy" for event in events),
            "members": [_member(member, job) for member in self.store.shards.members(job.id)],
        }


def _steady(samples: Sequence[Sample], total: int) -> float | None:
    """Records a second in the middle of a job, as a line through its progress has it; None for too short a job."""
    first, last = (share * total for share in _STEADY)
    middle = [sample for sample in samples if first <= sample[1] <= last]
    if len(middle) < _FEWEST:
        return None
    when, done = np.array(middle).T
    return round(float(np.polyfit(when - when[0], done, 1)[0]), 1)


def _wall_s(job: Job) -> float:
    assert job.finished_at is not None
    return max(1e-3, job.finished_at - job.created_at)


def _member(member: Member, job: Job) -> dict[str, Any]:
    span_s = member.moved_at - member.joined_at
    return {
        "device": member.device,
        "led": member.worker == job.worker,
        "records": member.records_done,
        "records_per_s": round(member.records_done / span_s, 1) if span_s > 0 else None,  # as `show` has it
        "joined_after_s": round(member.joined_at - job.created_at, 3),
        "last_shard_after_s": round(member.moved_at - job.created_at, 3),
        "failures": member.failures,
        "error": member.error,
        "card": member.software.get("device"),
    }


@contextmanager
def worker(store: Store, devices: str, folder: Path) -> Iterator[Host]:
    """A worker over these devices, which are ready. Its log is worker.log in the folder."""
    command = [sys.executable, "-P", "-m", "nimble_jobs.worker", "--home", str(store.home), "--devices", devices]
    with (folder / "worker.log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            host = Host(store, process, folder)
            host.ready()
            yield host
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def compared(one: Path, other: Path) -> dict[str, Any]:
    """Whether two published folders hold the same records in the same order with the same answers."""
    a, b = (pq.read_table(sorted(folder.glob("*.parquet"))) for folder in (one, other))
    if a.num_rows != b.num_rows:
        return {"equal": False, "records": [a.num_rows, b.num_rows]}
    same = {name: a[name].equals(b[name]) for name in ("id", "top1", "probability")}
    return {
        "equal": all(same.values()),
        **same,
        "probability_difference": _largest_difference(a, b),
        "answers": len(set(a["probability"].to_pylist())),  # if they were all the same, equality would say little
        "top1s": len(set(a["top1"].to_pylist())),
        "same_files": _files(one) == _files(other),
    }


def _largest_difference(a: pa.Table, b: pa.Table) -> float:
    differences = abs(a["probability"].to_numpy() - b["probability"].to_numpy())
    return float(differences.max(initial=0.0))


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}


def succeeded(found: dict[str, Any]) -> bool:
    """Whether a job of these figures has done all of its records in its first attempt."""
    return (found["state"], found["attempt"], found["records_bad"]) == (JobState.SUCCEEDED.value, 1, 0)
