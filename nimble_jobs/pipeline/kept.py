"""Threads that are kept for the next piece of work: starting one takes longer than most pieces of a small job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

_idle: list[_Kept] = []  # they wait for work; appending and popping are atomic
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of these threads


class Beside:
    """A piece of work that a kept thread does beside the caller."""

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        """Begin at once. Meanwhile `name` is the thread's."""
        self._work = work
        self._error: BaseException | None = None
        self._under_way = threading.Lock()
        self._under_way.acquire()
        try:
            thread = _idle.pop()
        except IndexError:
            thread = _Kept()
        thread.take(self, name)

    def wait(self) -> None:
        """Wait for its end. Raises what it raised."""
        with self._under_way:
            if self._error is not None:
                raise self._error

    def do(self) -> None:
        """Do the work; for the kept thread."""
        try:
            self._work()
        except BaseException as e:  # noqa: BLE001 - raised where its end is awaited
            self._error = e
        del self._work  # with all that it holds

    def over(self) -> None:
        """The work is done; for the kept thread."""
        self._under_way.release()


class _Kept:
    """A thread that does one piece of work after another, for as long as the process lives."""

    def __init__(self) -> None:
        self._next: SimpleQueue[Beside] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kept", daemon=True)
        self._thread.start()

    def take(self, piece: Beside, name: str) -> None:
        self._thread.name = name
        self._next.put(piece)

    def _run(self) -> None:
        while True:
            piece = self._next.get()
            piece.do()
            self._thread.name = "kept"
            _idle.append(self)  # first, so that whoever waited for this piece finds the thread idle
            piece.over()
            del piece
