"""The processes that decode: started when first needed, kept for later jobs, replaced when a picture kills one."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nimble_jobs.decoding import wire
from nimble_jobs.decoding.work import BAD, Answer, Row, Work

MOST = 16  # processes
IDLE_S = 60.0  # after so long without work they end
DIED = "cannot be decoded: the process that decoded it died twice"

_AT_ONCE = 2  # works that one process holds: one under way, one to go on with
_FEW = 3  # processes that may die before they have said anything
_END_S = 5.0
_ROOT = Path(__file__).parents[2]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def command() -> list[str]:
    """What starts the first process; the descriptor comes last."""
    start = f"import sys; sys.path.append({str(_ROOT)!r}); from nimble_jobs.decoding import server as s; "
    return [sys.executable, "-P", "-c", start + "s.main(int(sys.argv[1]))"]


@dataclass(eq=False)
class Shared:
    """Memory that processes may write to. `close` makes them forget it."""

    number: int
    memory: np.ndarray  # uint8 [*]
    descriptor: int


@dataclass(eq=False)
class _Task:
    work: Work
    blobs: tuple[bytes | memoryview, ...]
    shared: Shared
    future: Future[Answer]
    died: int = 0  # processes that died over it while it was alone


@dataclass(eq=False)
class _Process:
    link: socket.socket
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    out: deque[tuple[memoryview, int | None]] = field(default_factory=deque)  # what to send, and a descriptor with it
    tasks: dict[int, _Task] = field(default_factory=dict)  # in the order in which they are done
    knows: set[int] = field(default_factory=set)  # numbers of shared memory
    pid: int | None = None  # None: it has not said anything yet


class Decoders:
    """Processes that decode pictures into shared memory. Any thread may ask them.

    They start with the first work and end with `close`, after `idle_s` without work, or with this process. If they
    cannot be started, threads of this process do the work, and `trouble` says why.
    """

    unit = "process"

    def __init__(
        self, workers: int | None = None, *, idle_s: float = IDLE_S, program: Sequence[str] | None = None
    ) -> None:
        self.workers = workers or max(1, min(MOST, cores()))
        self._program = tuple(program or command())
        self._trouble: str | None = None
        self._idle_s = idle_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._given: deque[_Task] = deque()
        self._forget: list[int] = []
        self._crew: _Crew | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wake: Callable[[], None] = lambda: None

    @property
    def trouble(self) -> str | None:
        """Why threads do the work; None: processes do."""
        crew = self._crew
        return self._trouble or (crew.trouble if crew is not None else None)

    @property
    def running(self) -> bool:
        """Whether processes are there already."""
        return bool(self.pids)

    @property
    def pids(self) -> list[int]:
        """Of the processes that decode, as far as they have said so."""
        crew = self._crew
        return [] if crew is None else [p.pid for p in list(crew.processes) if p.pid is not None]

    def share(self, memory: np.ndarray, descriptor: int) -> Shared:
        """Let processes write to `memory`, uint8 [*], which is the file of a descriptor from its beginning."""
        return Shared(number=next(self._numbers), memory=memory, descriptor=os.dup(descriptor))

    def unshare(self, shared: Shared) -> None:
        """Let processes forget it. No work on it may be under way."""
        with self._lock:
            self._forget.append(shared.number)
            os.close(shared.descriptor)
            shared.descriptor = -1
        self._wake()

    def submit(self, work: Work, shared: Shared, blobs: Sequence[bytes | memoryview] = ()) -> Future[Answer]:
        """Begin a work. One that is cancelled in time is not done. Raises RuntimeError after `close`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the decoders are closed")
            self._given.append(_Task(work=work, blobs=tuple(blobs), shared=shared, future=future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nimble-decoders", daemon=True)
                self._thread.start()
        self._wake()
        return future

    def close(self) -> None:
        """End the processes. Works that are not done are cancelled."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        crew = _Crew(self.workers, self._program)
        self._crew, self._wake = crew, crew.wake
        idle_since = time.monotonic()
        try:
            while True:
                with self._lock:
                    given, self._given = list(self._given), deque()
                    forget, self._forget = self._forget, []
                    now = time.monotonic()
                    if given or crew.busy:
                        idle_since = now
                    if self._closed or now - idle_since >= self._idle_s:
                        self._thread, self._crew, self._wake = None, None, lambda: None
                        return
                for number in forget:
                    crew.forget(number)
                crew.turn(given, timeout=max(0.0, idle_since + self._idle_s - now))
        finally:
            self._trouble = self._trouble or crew.trouble
            crew.close()
            with self._lock:
                for task in [*self._given, *crew.left()] if self._closed else []:
                    if not task.future.cancel():
                        task.future.set_exception(RuntimeError("the decoders were closed"))


class _Crew:
    """The processes, as the one thread that talks to them sees them."""

    def __init__(self, workers: int, program: Sequence[str]) -> None:
        self._program = program
        self.processes: list[_Process] = []
        self.trouble: str | None = None
        self._workers = workers
        self._pending: deque[_Task] = deque()
        self._ids = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._first: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._early = 0  # processes that died before they said anything, in a row
        self._threads: ThreadPoolExecutor | None = None  # for what no process can do

    @property
    def busy(self) -> bool:
        return bool(self._pending) or any(p.tasks for p in self.processes)

    def wake(self) -> None:
        """Have `turn` return. From any thread."""
        with suppress(OSError):  # full: it will wake; closed: nobody is there
            self._ring.send(b"x")

    def left(self) -> list[_Task]:
        """Works that were not done."""
        return [*self._pending, *(t for p in self.processes for t in p.tasks.values())]

    def turn(self, given: Sequence[_Task], *, timeout: float) -> None:
        """Hand out works and take answers, waiting for something to happen."""
        self._pending.extend(given)
        self._hand_out()
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._bell:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)
            else:
                self._attend(key.data)
        self._hand_out()

    def forget(self, number: int) -> None:
        """Have all processes let go of shared memory."""
        for process in self.processes:
            if number in process.knows:
                process.knows.discard(number)
                self._say(process, wire.pack({"unmap": number}))

    def close(self) -> None:
        """End all processes, and wait for the first."""
        for process in list(self.processes):
            self._drop(process)
        self._end_first()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self._selector.close()
        self._bell.close()
        self._ring.close()

    def _hand_out(self) -> None:
        while self._pending:
            process = self._free()
            if process is None and self._threads is None:
                return
            task = self._pending.popleft()
            if not task.future.running() and not task.future.set_running_or_notify_cancel():
                continue
            if process is None:
                assert self._threads is not None
                self._threads.submit(_locally, task)
                continue
            number = next(self._ids)
            if task.shared.number not in process.knows:
                process.knows.add(task.shared.number)
                message = {"map": task.shared.number, "nbytes": len(task.shared.memory)}
                self._say(process, wire.pack(message), descriptor=os.dup(task.shared.descriptor))
            process.tasks[number] = task
            asked = {"task": number, "in": task.shared.number, "work": task.work.to_json()}
            self._say(process, wire.pack(asked, task.blobs))

    def _free(self) -> _Process | None:
        """A process with room for one more work, started if there are too few."""
        if self._threads is not None:
            return None
        idle = min(self.processes, key=lambda p: len(p.tasks), default=None)
        if (idle is None or idle.tasks) and len(self.processes) < self._workers:
            try:
                return self._start()
            except OSError as e:
                self._give_up(f"{e.strerror or e}")
                return None
        return idle if idle is not None and len(idle.tasks) < _AT_ONCE else None

    def _start(self) -> _Process:
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                self._fork(theirs)
            except OSError:  # the first process ended just now
                self._end_first()
                try:
                    self._fork(theirs)
                except OSError:
                    mine.close()
                    raise
        mine.setblocking(False)
        process = _Process(link=mine)
        self._selector.register(mine, selectors.EVENT_READ, process)
        self.processes.append(process)
        return process

    def _fork(self, link: socket.socket) -> None:
        if self._first is None or self._first.poll() is not None:
            self._start_first()
        assert self._control is not None
        socket.send_fds(self._control, [b"f"], [link.fileno()])

    def _start_first(self) -> None:
        self._end_first()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._first = subprocess.Popen(  # noqa: S603 - ours
                [*self._program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def _end_first(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._first is not None:
            try:
                self._first.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._first.kill()
                self._first.wait()
            self._first = None

    def _give_up(self, why: str) -> None:
        self.trouble = f"pictures are decoded by threads, because no process can be started: {why}"
        self._threads = ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix="nimble-decode")

    def _say(self, process: _Process, parts: Sequence[memoryview], descriptor: int | None = None) -> None:
        for part in parts:
            process.out.append((part, descriptor))
            descriptor = None
        self._flush(process)

    def _flush(self, process: _Process) -> None:
        try:
            while process.out:
                part, descriptor = process.out[0]
                with_it = [] if descriptor is None else [descriptor]
                count = socket.send_fds(process.link, [part], with_it)
                if descriptor is not None:
                    os.close(descriptor)
                if count == len(part):
                    process.out.popleft()
                else:
                    process.out[0] = (part[count:], None)
        except BlockingIOError:
            pass
        except OSError:
            return  # it is gone: reading says so
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.out else 0)
        self._selector.modify(process.link, wanted, process)

    def _attend(self, process: _Process) -> None:
        self._flush(process)
        try:
            there = process.inbox.read(process.link)
        except BlockingIOError:
            return
        except OSError:
            there = False
        while (arrived := process.inbox.take()) is not None:
            message, _ = arrived
            if "pid" in message:
                process.pid, self._early = message["pid"], 0
            else:
                future = process.tasks.pop(message["task"]).future
                if "error" in message:
                    future.set_exception(RuntimeError(message["error"]))
                else:
                    future.set_result(Answer.of_json(message))
        if not there:
            self._drop(process)
            self._bury(process)

    def _drop(self, process: _Process) -> None:
        self._selector.unregister(process.link)
        process.link.close()
        for _, descriptor in process.out:
            if descriptor is not None:
                os.close(descriptor)
        process.out.clear()
        self.processes.remove(process)

    def _bury(self, process: _Process) -> None:
        """Give what a dead process held to others. The picture that it died over is tried alone, and twice."""
        tasks = list(process.tasks.values())
        if process.pid is None:
            self._early += 1
            if self._early >= _FEW:
                self._give_up("they end at once")
        elif tasks:
            tasks[:1] = _blamed(tasks[0])
        self._pending.extendleft(reversed(tasks))


def _blamed(task: _Task) -> list[_Task]:
    """What is tried again after a process died over a task: its pictures one by one, none that did so twice alone."""
    if len(task.work.items) == 1:
        if task.died:
            task.future.set_result(Answer(rows=(Row(status=BAD, reason=DIED),), busy_s=0.0))
            return []
        task.died = 1
        return [task]
    blobs = iter(task.blobs)
    alone = []
    for item in task.work.items:
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        mine = () if item.path is not None else (next(blobs),)
        work = replace(task.work, items=(item,))
        alone.append(_Task(work=work, blobs=mine, shared=task.shared, future=future))
    _together([t.future for t in alone], task.future)
    return alone


def _together(parts: Sequence[Future[Answer]], whole: Future[Answer]) -> None:
    """Answer `whole` once all of its parts are."""
    left = len(parts)

    def one_more(_: Future[Answer]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if (error := next((e for p in parts if (e := p.exception()) is not None), None)) is not None:
                whole.set_exception(error)
                return
            answers = [p.result() for p in parts]
            rows = tuple(row for a in answers for row in a.rows)
            whole.set_result(Answer(rows=rows, busy_s=sum(a.busy_s for a in answers)))

    for part in parts:
        part.add_done_callback(one_more)


def _locally(task: _Task) -> None:
    from nimble_jobs.decoding.do import do  # loads Pillow, which others who own a pool may never need

    try:
        task.future.set_result(do(task.work, task.shared.memory, task.blobs))
    except BaseException as e:  # noqa: BLE001 - raised where the answer is asked for
        task.future.set_exception(e)
