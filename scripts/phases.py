"""Where the time of a process goes: seconds by thread and phase. Imports little, so that timed imports stay true."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Phase:
    """What one thread spent on one thing; times since the clock's start."""

    first_s: float  # began first
    last_s: float  # ended last
    wall_s: float = 0.0  # without the phases inside
    cpu_s: float = 0.0  # the same, only of this thread


class Clock:
    """The phases of each thread. While an inner phase runs, the outer one's clock stands still.

    `start` is the clock's zero, in seconds of `time.perf_counter`. `wait` is called at each begin and end, so that a
    device's work counts for the phase that launched it.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None, *, start: float = 0.0) -> None:
        self.threads: defaultdict[str, dict[str, Phase]] = defaultdict(dict)
        self._wait = wait
        self._start = start
        self._mine = threading.local()

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds by phase, of all threads together."""
        found: defaultdict[str, float] = defaultdict(float)
        for phases in list(self.threads.values()):
            for name, phase in list(phases.items()):
                found[name] += phase.wall_s
        return dict(found)

    def turn(self, begins: str | None) -> None:
        """A phase begins; None: the present one ends."""
        self._wait()
        now, cpu = time.perf_counter() - self._start, time.thread_time()
        mine = self._mine.__dict__
        stack: list[str] = mine.setdefault("stack", [])
        phases = self.threads[threading.current_thread().name]
        if stack:
            phase = phases.setdefault(stack[-1], Phase(mine["since"], now))
            phase.wall_s += now - mine["since"]
            phase.cpu_s += cpu - mine["cpu"]
            phase.last_s = now
        mine["since"], mine["cpu"] = now, cpu
        if begins is None:
            stack.pop()
        else:
            stack.append(begins)
            phases.setdefault(begins, Phase(now, now))

    def within(self, name: str) -> bool:
        """Whether this thread is in a phase of this name."""
        return name in self._mine.__dict__.get("stack", ())

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """A block as a phase."""
        self.turn(name)
        try:
            yield
        finally:
            self.turn(None)

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function as a phase."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.time(name):
                return function(*args, **kwargs)

        return call

    def watch(self, places: dict[str, str]) -> None:
        """Time functions, named MODULE:PATH as where they are called from."""
        for place, name in places.items():
            module, _, path = place.partition(":")
            self.patch(importlib.import_module(module), path, name)

    def patch(self, module: Any, path: str, name: str) -> None:
        """Time one function of a module. One that is not there is named on stderr."""
        *owners, last = path.split(".")
        try:
            owner = functools.reduce(getattr, owners, module)
            function = getattr(owner, last)
        except AttributeError:
            print(f"not timed, as it is not there: {module.__name__}.{path} ({name})", file=sys.stderr)
        else:
            setattr(owner, last, self.timed(function, name))
