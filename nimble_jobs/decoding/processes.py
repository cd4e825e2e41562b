"""Starts decoding processes, talks to them, and gives a dead process's work to others."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nimble_jobs.decoding import wire
from nimble_jobs.decoding.task import Task, blamed, do_here
from nimble_jobs.decoding.work import Answer

_AT_ONCE = 2  # pieces of work that one process holds: one in progress, one to go on with
_FEW = 3  # processes in a row that may die before their first message
_END_S = 5.0
_ROOT = Path(__file__).parents[2]


def command() -> list[str]:
    """The command that starts the first process, without its last argument, the descriptor."""
    start = f"import sys; sys.path.append({str(_ROOT)!r}); from nimble_jobs.decoding import server as s; "
    return [sys.executable, "-P", "-c", start + "s.main(int(sys.argv[1]))"]


@dataclass(eq=False)
class _Process:
    """One decoding process."""

    link: socket.socket
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    out: deque[tuple[memoryview, int | None]] = field(default_factory=deque)  # what to send, and a descriptor with it
    tasks: dict[int, Task] = field(default_factory=dict)  # in the order in which they are done
    knows: set[int] = field(default_factory=set)  # numbers of shared memory
    pid: int | None = None  # None: it has not said anything yet


class Processes:
    """All decoding processes. Only one thread talks to them."""

    def __init__(self, workers: int, program: Sequence[str]) -> None:
        self._program = program
        self.known: list[_Process] = []
        self.trouble: str | None = None
        self._workers = workers
        self._pending: deque[Task] = deque()
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

    def start(self) -> None:
        """Start all processes, ahead of their first work."""
        try:
            while len(self.known) < self._workers:
                self._start()
        except OSError as e:
            self._give_up(f"{e.strerror or e}")

    @property
    def busy(self) -> bool:
        return bool(self._pending) or any(p.tasks for p in self.known)

    def wake(self) -> None:
        """Make `turn` return. Any thread may call this."""
        with suppress(OSError):  # full: it will wake; closed: nobody is there
            self._ring.send(b"x")

    def left(self) -> list[Task]:
        """Unfinished work."""
        return [*self._pending, *(t for p in self.known for t in p.tasks.values())]

    def turn(self, given: Sequence[Task], *, timeout: float) -> None:
        """Hand out work and take answers. Waits up to `timeout` seconds for something to happen."""
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
        """Let all processes release shared memory."""
        for process in self.known:
            if number in process.knows:
                process.knows.discard(number)
                self._say(process, wire.pack({"unmap": number}))

    def close(self) -> None:
        """End all processes, and wait for the first."""
        for process in list(self.known):
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
                self._threads.submit(do_here, task)
                continue
            number = next(self._ids)
            process.tasks[number] = task  # from now on `left` knows of it
            if task.shared.number not in process.knows:
                process.knows.add(task.shared.number)
                message = {"map": task.shared.number, "nbytes": len(task.shared.memory)}
                self._say(process, wire.pack(message), descriptor=os.dup(task.shared.descriptor))
            message, packed = task.work.packed()
            asked = {"task": number, "in": task.shared.number, "work": message}
            self._say(process, wire.pack(asked, (*packed, *task.blobs)))

    def _free(self) -> _Process | None:
        """A process with room for one more piece of work. Starts one if there are too few."""
        if self._threads is not None:
            return None
        idle = min(self.known, key=lambda p: len(p.tasks), default=None)
        if (idle is None or idle.tasks) and len(self.known) < self._workers:
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
        self.known.append(process)
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
            message, blobs = arrived
            if "pid" in message:
                process.pid, self._early = message["pid"], 0
            else:
                future = process.tasks.pop(message["task"]).future
                if "error" in message:
                    future.set_exception(RuntimeError(message["error"]))
                else:
                    future.set_result(Answer.unpacked(message, blobs))
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
        self.known.remove(process)

    def _bury(self, process: _Process) -> None:
        """Give a dead process's work to others. The picture that it died over is tried alone, at most twice."""
        tasks = list(process.tasks.values())
        if process.pid is None:
            self._early += 1
            if self._early >= _FEW:
                self._give_up("they end at once")
        elif tasks:
            tasks[:1] = blamed(tasks[0])
        self._pending.extendleft(reversed(tasks))
