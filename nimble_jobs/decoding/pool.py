"""The processes that decode: started when first needed, kept for later jobs, replaced when a picture kills one."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from nimble_jobs.decoding.processes import Processes, command
from nimble_jobs.decoding.task import Shared, Task
from nimble_jobs.decoding.work import Answer, Work
from nimble_jobs.pipeline import usable_cores

IDLE_S = 60.0  # the processes end after so long without work


class Decoders:
    """Processes that decode pictures into shared memory. Any thread may use them.

    They start with the first work and end with `close`, after `idle_s` without work, or with this process. If they
    cannot be started, threads of this process do the work, and `trouble` says why.
    """

    unit = "process"

    def __init__(
        self, workers: int | None = None, *, idle_s: float = IDLE_S, program: Sequence[str] | None = None
    ) -> None:
        self.workers = workers or usable_cores()
        self._program = tuple(program or command())
        self._trouble: str | None = None
        self._idle_s = idle_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._given: deque[Task] = deque()
        self._forget: list[int] = []
        self._crew: Processes | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wake: Callable[[], None] = lambda: None

    @property
    def trouble(self) -> str | None:
        """Why threads do the work; None if processes do."""
        crew = self._crew
        return self._trouble or (crew.trouble if crew is not None else None)

    @property
    def running(self) -> bool:
        """Whether processes have been started, or are being started, and have not ended since."""
        return self._thread is not None

    @property
    def pids(self) -> list[int]:
        """Ids of the decoding processes that have reported theirs."""
        crew = self._crew
        return [] if crew is None else [p.pid for p in list(crew.known) if p.pid is not None]

    def share(self, memory: np.ndarray, descriptor: int) -> Shared:
        """Let processes write to `memory`, uint8 [*], which maps the descriptor's file from its beginning."""
        return Shared(number=next(self._numbers), memory=memory, descriptor=os.dup(descriptor))

    def unshare(self, shared: Shared) -> None:
        """Let processes release shared memory. No work may still use it."""
        with self._lock:
            self._forget.append(shared.number)
            os.close(shared.descriptor)
            shared.descriptor = -1
        self._wake()

    def start(self) -> None:
        """Start the processes, ahead of their first work."""
        with self._lock:
            if not self._closed:
                self._begin()

    def submit(self, work: Work, shared: Shared, blobs: Sequence[bytes | memoryview] = ()) -> Future[Answer]:
        """Queue a piece of work. It can be cancelled until it begins. Raises RuntimeError after `close`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the decoders are closed")
            self._given.append(Task(work=work, blobs=tuple(blobs), shared=shared, future=future))
            self._begin()
        self._wake()
        return future

    def close(self) -> None:
        """End the processes. Unfinished work is cancelled."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake()
        if thread is not None:
            thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nimble-decoders", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Serve until there is no more work. An error here is raised by all unfinished work."""
        crew: Processes | None = None
        error: Exception | None = None
        try:
            crew = Processes(self.workers, self._program)
            self._crew, self._wake = crew, crew.wake
            crew.start()
            self._serve(crew)
        except Exception as e:  # noqa: BLE001 - raised by the futures, and the next work begins anew
            error = e
            with self._lock:
                self._thread, self._crew, self._wake = None, None, lambda: None
                given, self._given = list(self._given), deque()
            _fail(given, error)
        finally:
            if crew is not None:
                self._trouble = self._trouble or crew.trouble
                left = crew.left()  # before the processes that hold them are forgotten
                crew.close()
                _fail(left, error)
            with self._lock:
                given = list(self._given) if self._closed else []
            _fail(given, error)

    def _serve(self, crew: Processes) -> None:
        idle_since = time.monotonic()
        while True:
            with self._lock:
                now = time.monotonic()
                if self._given or crew.busy:
                    idle_since = now
                if self._closed or now - idle_since >= self._idle_s:
                    self._thread, self._crew, self._wake = None, None, lambda: None
                    return
                given, self._given = list(self._given), deque()
                forget, self._forget = self._forget, []
            for number in forget:
                crew.forget(number)
            crew.turn(given, timeout=max(0.0, idle_since + self._idle_s - now))


def _fail(tasks: Sequence[Task], error: Exception | None) -> None:
    """Fail work that will not be done. Without `error`, `close` is the reason."""
    for task in tasks:
        if task.future.done() or (error is None and task.future.cancel()):
            continue
        if task.future.running() or task.future.set_running_or_notify_cancel():
            task.future.set_exception(error or RuntimeError("the decoders were closed"))
