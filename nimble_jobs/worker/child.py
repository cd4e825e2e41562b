"""The process that uses the device. It takes jobs from its supervisor, one at a time, and never outlives it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn

from nimble_jobs.errors import LeaseLost, NimbleError
from nimble_jobs.job import Job
from nimble_jobs.orphans import ORPHANED, die_with
from nimble_jobs.patience import Patience
from nimble_jobs.store import Store
from nimble_jobs.worker import logs, stacks
from nimble_jobs.worker.idle import LOOK_S, Idle
from nimble_jobs.worker.messages import Borrows, Done, Drain, Ready, Refused, Waits
from nimble_jobs.worker.settings import open_impatient, patience_s
from nimble_jobs.worker.stamps import Stamps

if TYPE_CHECKING:
    from nimble_jobs.worker.executor import Station

log = logging.getLogger(__name__)

UNFIT = 71  # exit code

MakeStation = Callable[[Store, str, str, int | None], "Station"]


def main(
    link: Connection,
    home: Path,
    worker: str,
    device: str,
    gpu_memory_bytes: int | None,
    parent: int,
    stamps: Connection,
    *,
    make_station: MakeStation | None = None,
) -> None:
    """Run jobs on `device` until the supervisor, whose process id is `parent`, asks to stop or dies.

    Progress goes into the pipe `stamps`. The process leads its own group, so that processes that it starts can be ended
    with it. `make_station(store, worker, device, gpu_memory_bytes)` says where they run; by default, on the real
    device.
    """
    die_with(parent)
    os.setpgid(0, 0)
    # A terminal sends signals to every process; this one is asked by a Drain message.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    logs.forgive_stderr()
    logs.to_stderr()
    stacks.to_stderr()
    logging.captureWarnings(True)
    inbox = _Inbox(link)
    try:
        from nimble_jobs.worker.executor import execute, real_station  # torch is loaded in this process only
        from nimble_jobs.workloads.context import Stop

        store = _opened(home, worker, inbox)
        station = (make_station or real_station)(store, worker, device, gpu_memory_bytes)
        station = replace(station, borrow=partial(_borrow, link))
    except NimbleError as error:
        _tell(link, Refused(message=str(error), exit_code=error.exit_code))
        return
    _tell(link, Ready(device=station.device, software=dict(station.software), most_ranks=station.most_ranks))
    moved = Stamps(stamps)
    idle = Idle(station, worker)
    while job := inbox.next_job(idle):
        with stacks.to_file(logs.job_log_path(home, job.id)):
            sound = execute(
                job,
                station,
                wish=lambda: Stop.DRAIN if inbox.draining else Stop.GO,
                on_wait=lambda reason: _tell(link, Waits(reason=reason)),
                on_move=moved,
            )
        _tell(link, Done(job_id=job.id, attempt=job.attempt, last=not sound))
        if not sound:
            log.error("this process ends, so that no other job runs on a faulty device")
            idle.over()
            _exit(UNFIT)
        idle.back()
    station.close()
    store.close()
    _exit(0)


def _opened(home: Path, worker: str, inbox: _Inbox) -> Store:
    """The store, in which this process may write while its worker's lease runs. Raises StoreError."""
    opening = Patience(limit_s=patience_s(home), check=lambda _waited_s: inbox.check())
    store = opening.through(lambda: open_impatient(home, create=False))
    try:
        opening.through(lambda: store.workers.follow(worker, _end_now))
    except LeaseLost:
        _end_now()
    return store


class _Inbox:
    """Reads the pipe on its own thread, so that orders arrive while a job runs and a dead supervisor is noticed."""

    def __init__(self, link: Connection) -> None:
        self.draining = False
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=self._read, args=(link,), name="inbox", daemon=True).start()

    def next_job(self, idle: Idle) -> Job | None:
        """Wait for the next job; None if there will be no more. `idle` may use the time until then."""
        while True:
            try:
                job = self._jobs.get(timeout=LOOK_S)
            except Empty:
                idle.look()
            else:
                idle.over()
                return job

    def check(self) -> None:
        """Ends the process if it was asked to stop."""
        if self.draining:
            _exit(0)

    def _read(self, link: Connection) -> None:
        while True:
            try:
                order = link.recv()
            except (EOFError, OSError):
                _exit(ORPHANED)
            if isinstance(order, Drain):
                self.draining = True
                self._jobs.put(None)
            else:
                self._jobs.put(order)


def _borrow(link: Connection, devices: Sequence[str], count: int) -> None:
    _tell(link, Borrows(devices=tuple(devices), count=count))


def _tell(link: Connection, message: Ready | Refused | Waits | Borrows | Done) -> None:
    try:
        link.send(message)
    except OSError:  # the supervisor died a moment ago
        _exit(ORPHANED)


def _end_now() -> NoReturn:
    """The worker's lease is over for good: kill this process and all that it started. What it does is of no use."""
    log.error("the worker's lease has ended and another worker may have its job; this process ends")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.killpg(0, signal.SIGKILL)
    _exit(ORPHANED)  # never reached; the signal cannot be ignored


def _exit(code: int) -> NoReturn:
    """Leave without the interpreter's clean-up, which can hang on a device that does not answer."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
