"""The supervisor's side of its child: starts it, talks to it, kills it, and says how it died."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil

from nimble_jobs.job import Job
from nimble_jobs.spec.units import format_duration
from nimble_jobs.worker import stamps
from nimble_jobs.worker.messages import Borrows, Done, Drain, Ready, Refused, Waits

log = logging.getLogger(__name__)

Target = Callable[[Connection, Path, str, str, int | None, int, Connection], None]  # child.main

STACKS_S = 1.0  # time for a hanging process to write its stacks
SEND_S = 1.0  # time for it to read an order
# Largest message that a pipe surely takes at once: it holds 200 KiB, and at most a few small messages wait in it.
SMALL_BYTES = 32 << 10
LEAVING_S = 30.0  # time for it to end by itself


class Child:
    """One child process from its start to its death."""

    def __init__(self, target: Target, home: Path, worker: str, device: str, gpu_memory_bytes: int | None) -> None:
        # A forked process could use neither CUDA nor our database connections.
        context = multiprocessing.get_context("spawn")
        self.link, theirs = context.Pipe()
        self._stamps, their_stamps = context.Pipe(duplex=False)
        os.set_blocking(self._stamps.fileno(), False)
        self._sending = threading.Lock()  # sends messages one at a time
        self.started_at = time.monotonic()
        self.leaving_since: float | None = None  # it will end by itself after its job
        self.device: str | None = None  # known once it is ready
        self.software: dict[str, str] = {}
        self.most_ranks = 1
        self.draining = False
        self._process = context.Process(
            target=target,
            args=(theirs, home, worker, device, gpu_memory_bytes, os.getpid(), their_stamps),
            name="nimble-jobs child",
        )
        resource_tracker.ensure_running()  # otherwise `start` would start it, and unblock the signals too early
        ours = (signal.SIGINT, signal.SIGTERM)
        # The child inherits the blocked signals, so none can kill it before it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        their_stamps.close()
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
        """Whether it takes another job, now or after its current one."""
        return self.device is not None and self.leaving_since is None and not self.draining

    def moved(self) -> bool:
        """Whether the computing thread made progress since the last call."""
        return stamps.any_of(self._stamps)

    def late(self, now: float, start_s: float) -> str | None:
        """Why it must be ended at `now`, of the monotonic clock, if it hangs while it starts or ends; else None."""
        if self.leaving_since is not None:
            hangs = now - self.leaving_since > LEAVING_S
            return f"did not exit within {format_duration(LEAVING_S)}" if hangs else None
        if self.device is None and now - self.started_at > start_s:
            return f"was not ready within {format_duration(start_s)}"
        return None

    def run(self, job: Job) -> None:
        """Send it a job. If it has just died, its sentinel tells."""
        self._send(job)

    def drain(self) -> None:
        """Ask it to give its job back at the next safe point and to end."""
        self.draining = True
        self._send(Drain())

    def messages(self) -> list[Ready | Refused | Waits | Borrows | Done]:
        """Its messages since the last call."""
        received: list[Ready | Refused | Waits | Borrows | Done] = []
        try:
            while self.link.poll():
                received.append(self.link.recv())
        except (EOFError, OSError):  # dead; the sentinel says so
            pass
        return received

    def kill(self) -> None:
        """Send SIGKILL to it and to all processes that it started, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def end(self) -> bool:
        """Let it write its stacks, then `kill` it. False if it hung because a signal had stopped it.

        A stopped process is not continued for this, since its job would go on for a moment.
        """
        stopped = self._stopped()
        if not stopped:
            self._signal(signal.SIGTERM)
            self._process.join(STACKS_S)
        self.kill()
        return not stopped

    def bury(self) -> str:
        """Wait for its end and free its resources. Returns how it ended, in words."""
        self._process.join()
        code = self._process.exitcode or 0
        held = self._sending.acquire(timeout=SEND_S)  # a pending order fails now, because nothing can read it any more
        self.link.close()
        if held:
            self._sending.release()
        self._stamps.close()
        self._process.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _stopped(self) -> bool:
        try:
            return bool(psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group, or to the process itself if it has not made a group yet."""
        pid = self._process.pid
        # It has not been waited for, so no other process can have its id.
        if pid is not None and self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _send(self, message: Any) -> None:
        """Send without blocking, since the process may be stopped. A thread sends messages that could fill the pipe."""
        if not self._sending.locked() and _fits(self.link, message):
            self._send_whole(message)
            return
        sender = threading.Thread(target=self._send_whole, args=(message,), name="sender", daemon=True)
        sender.start()
        sender.join(SEND_S)
        if sender.is_alive():
            log.warning("the child process does not read its orders")

    def _send_whole(self, message: Any) -> None:
        try:
            with self._sending:
                self.link.send(message)
        except (OSError, TypeError) as e:  # ValueError: the pipe was closed during the write
            if isinstance(e, TypeError) and not self.link.closed:
                raise
            log.warning("the child process no longer listens")


def _fits(link: Connection, message: Any) -> bool:
    """Whether the pipe takes the message at once. A socket is writable while most of its buffer is free."""
    if len(ForkingPickler.dumps(message)) > SMALL_BYTES:
        return False
    poll = select.poll()
    poll.register(link.fileno(), select.POLLOUT)
    return bool(poll.poll(0))
