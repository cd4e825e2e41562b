"""The supervisor's side of its child: start, talk, kill, and say how it died."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nimble_jobs.job import Job
from nimble_jobs.worker.messages import Done, Drain, Ready, Refused, Waits

log = logging.getLogger(__name__)

Target = Callable[[Connection, Path, str, str, int | None, int], None]  # child.main


class Child:
    """One child process from its start to its death."""

    def __init__(self, target: Target, home: Path, worker: str, device: str, gpu_memory_bytes: int | None) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA, nor our connections
        self.link, theirs = context.Pipe()
        self.device: str | None = None  # known once it is ready
        self.draining = False
        self.leaving = False  # ends by itself, after what it ran
        self._process = context.Process(
            target=target, args=(theirs, home, worker, device, gpu_memory_bytes, os.getpid()), name="nimble-jobs child"
        )
        resource_tracker.ensure_running()  # started by `start` otherwise, which would unblock the signals too early
        ours = (signal.SIGINT, signal.SIGTERM)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # inherited: none may kill it before it can ignore them
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        log.info("child process %d starts", self._process.pid)

    @property
    def sentinel(self) -> int:
        """Readable when the process is dead."""
        return self._process.sentinel

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def takes_jobs(self) -> bool:
        """Whether it is ready for another job, now or once it is done with one."""
        return self.device is not None and not self.leaving

    def run(self, job: Job) -> None:
        """Hand it a job. One that just died is noticed by its sentinel."""
        self._send(job)

    def drain(self) -> None:
        """Ask it to give its job back at the next safe point and to end."""
        self.draining = True
        self._send(Drain())

    def messages(self) -> list[Ready | Refused | Waits | Done]:
        """What it has said since the last call."""
        said: list[Ready | Refused | Waits | Done] = []
        try:
            while self.link.poll():
                said.append(self.link.recv())
        except (EOFError, OSError):  # dead; the sentinel says so
            pass
        return said

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def bury(self) -> str:
        """Wait for its end and free what belongs to it; how it ended, in words."""
        self._process.join()
        code = self._process.exitcode or 0
        self.link.close()
        self._process.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _send(self, message: Any) -> None:
        try:
            self.link.send(message)
        except OSError:
            log.warning("the child process no longer listens")
