"""Faults that come over workers in rounds: kills, stops, full disks, held locks, replaced databases, jumping clocks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil

from nimble_jobs.store import Store
from nimble_jobs.store.home import DATABASE
from tests import zygote
from tests.waiting import PATIENCE_S

DAY_S = 86400.0
# Found by every process of the farm that starts: its clock is what the file says ahead of, or behind, the machine's.
CLOCK = """
import os, time

_real = time.time

def _now():
    try:
        with open(os.environ["FAULTS_CLOCK"]) as file:
            return _real() + float(file.read() or 0)
    except (OSError, ValueError):
        return _real()

time.time = _now
"""


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """No byte of a file system is free inside the block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Another process has the database to itself, so that nobody reads or writes it."""
    script = f"""
import sqlite3, sys
c = sqlite3.connect({str(store.home / DATABASE)!r}, isolation_level=None, timeout=20)
c.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        yield
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()


@contextmanager
def unwritten(home: Path) -> Iterator[None]:
    """Nobody writes to the database inside the block."""
    with closing(sqlite3.connect(home / DATABASE, isolation_level=None, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def replace_database(home: Path) -> None:
    """Put a copy of the database, of this moment, in its place, as a restored backup would be."""
    with unwritten(home):
        copy = home / "copy.db"
        shutil.copy2(home / DATABASE, copy)
        copy.replace(home / DATABASE)


class Faults:
    """Brings faults over a worker; one that was killed is started again with `start`."""

    def __init__(
        self, store: Store, folder: Path, disk: Path | None, start: Callable[[], subprocess.Popen[bytes]]
    ) -> None:
        self.store, self.worker = store, start()
        self._start = start
        self._disk = disk
        self._clock = folder / "clock"
        self.kinds: dict[str, Callable[[random.Random], None]] = {
            "kill child": lambda _: self._kill(child=True),
            "kill supervisor": lambda _: self._kill(supervisor=True),
            "kill both": lambda _: self._kill(child=True, supervisor=True),
            "stop": self._stop,
            "lock": self._lock,
            "replace database": lambda _: replace_database(store.home),
            "clock": self._jump,
        }
        if disk is not None:
            self.kinds["full disk"] = self._fill

    def _kill(self, *, child: bool = False, supervisor: bool = False) -> None:
        children = zygote.spawned(self.worker.pid)
        for process in children if child else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if supervisor:
            self.worker.kill()
            self.worker.wait()
            _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
            assert not alive, "the child outlived its supervisor"
            self.worker = self._start()

    def _stop(self, rng: random.Random) -> None:
        """One of the processes, or both, stop for a while."""
        victims = [psutil.Process(self.worker.pid), *zygote.spawned(self.worker.pid)]
        chosen = rng.sample(victims, rng.randint(1, len(victims)))
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.2, 2.0))
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def _fill(self, rng: random.Random) -> None:
        assert self._disk is not None
        with full(self._disk):
            time.sleep(rng.uniform(0.2, 3.0))

    def _lock(self, rng: random.Random) -> None:
        with locked(self.store):
            time.sleep(rng.uniform(0.2, 3.0))

    def _jump(self, rng: random.Random) -> None:
        self._clock.write_text(str(rng.choice([-DAY_S, 0.0, DAY_S])))


def environment(folder: Path) -> dict[str, str]:
    """For workers whose clock `Faults` can move."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(CLOCK)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, "FAULTS_CLOCK": str(folder / "clock"), "OMP_NUM_THREADS": "1"}
