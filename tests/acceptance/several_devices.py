"""Real workers with several devices on the CPU, and jobs that they share."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

from nimble_jobs import client
from nimble_jobs.job import Job, Member
from nimble_jobs.store import Store
from nimble_jobs.store.home import DATABASE
from tests import prefork, zygote
from tests.waiting import PATIENCE_S, until


def pause(base: Path, seconds: float) -> None:
    """From now on, the model takes so long for a batch. The file is never half written."""
    new = base / "pause.new"
    new.write_text(str(seconds))
    new.rename(base / "pause")


def hold(base: Path) -> None:
    """From now on, each process waits in the model once it has seen a few shards, until `release`."""
    (base / "held").touch()


def release(base: Path) -> None:
    (base / "held").unlink()


@contextmanager
def worker(store: Store, base: Path, devices: str) -> Iterator[subprocess.Popen[str]]:
    """A real worker; no process of it is left behind."""
    log = base / f"worker-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "nimble_jobs.worker", "--home", str(store.home), "--devices", devices]
    with log.open("w") as file:
        process = prefork.start(command, stderr=file, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            print(log.read_text())  # seen where a test fails


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "manifest.json"}


def under_way(store: Store, job: Job, records: int) -> list[Member]:
    """The members, once two of them have finished shards with so many records. Their job is on `hold`."""

    def both() -> list[Member]:
        members = store.shards.members(job.id)
        return members if len([m for m in members if m.records_done >= records]) == 2 else []

    found: list[Member] = until(both)
    return found


def child_of(store: Store, process: subprocess.Popen[str], member: Member) -> psutil.Process:
    """The process of a member: children are started in the order of the devices."""
    children = zygote.spawned(process.pid)
    return children[[info.id for info in store.workers.live()].index(member.worker)]


def stop(store: Store, process: psutil.Process) -> None:
    """Stop it at a moment when it does not hold the database's lock, for which all others would wait."""
    while True:
        process.send_signal(signal.SIGSTOP)
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        with closing(sqlite3.connect(store.home / DATABASE, timeout=0.2)) as connection:
            try:
                connection.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:
                process.send_signal(signal.SIGCONT)
                time.sleep(0.05)
            else:
                return


def ended(store: Store, job: Job, timeout_s: float = 2 * PATIENCE_S) -> Job:
    (done,) = client.wait([job.id], store=store, timeout_s=timeout_s)
    return done
