"""Which way each kind of task runs: measured once, by this build or an earlier one.

Whoever has several ways to run a task asks `current()`. Outside of `using`, a process remembers what it measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch

from nimble_jobs.engine.device import facts
from nimble_jobs.engine.measure import copies_at_once
from nimble_jobs.engine.private.modes import modes_off
from nimble_jobs.schedule import FORMAT_VERSION
from nimble_jobs.task_times import Parts, TaskChoice, TaskTimes, task_key

LIBRARY = "library"  # a way that every task has
Ahead = Callable[[Collection[str]], object]  # is told which ways to run a task will be needed


def nothing_ahead(_: Collection[str]) -> None:
    """For ways that need no kernels of ours."""


_NONE: Mapping[str, TaskTimes] = MappingProxyType({})


class Choices:
    """The choices of one build."""

    def __init__(self, earlier: Mapping[str, TaskTimes] = _NONE) -> None:
        """`earlier`: what earlier builds measured, by the key of the task."""
        self._earlier = dict(earlier)
        self._asked: Counter[str] = Counter()  # since `begin`, by key
        self.measured: dict[str, tuple[Parts, TaskTimes]] = {}  # by this build, with the parts of the key
        self.used: set[str] = set()  # keys of choices of earlier builds that this build goes by
        self.doubted: set[str] = set()  # keys of choices of earlier builds that did not work

    def choose(
        self, parts: Parts, ways: Collection[str], measure: Callable[[], TaskTimes], ahead: Ahead = nothing_ahead
    ) -> str:
        """The way to run a task of this kind, one of `ways`. A kind that no build has measured is measured now.

        `parts` name the operation, shapes and settings, the device and its software. Inside of `looking_ahead`, `ahead`
        is told the ways that will be needed. Raises what `measure` raises.
        """
        parts, copies = {**parts, "ways": ", ".join(ways)}, copies_at_once()
        if copies > 1:
            parts["at once"] = str(copies)
        key = task_key(parts)
        known = self._known(key)
        if known is not None and known.chosen not in ways:
            known = None
        if _looking_ahead.get():
            ahead(ways if known is None else [known.chosen])
            return LIBRARY
        if known is None:
            known = measure()
            if copies > 1:
                known = replace(known, task=f"{known.task}, {copies} at once")
            self.measured[key] = (parts, known)
        elif key not in self.measured:
            self.used.add(key)
        self._asked[key] += 1
        return known.chosen

    def begin(self) -> None:
        """Other tasks are chosen for from now on."""
        self._asked.clear()

    def made(self) -> tuple[TaskChoice, ...]:
        """The choices since `begin`, the most frequent kinds of tasks first."""
        known = ((self._known(key), tasks) for key, tasks in self._asked.most_common())
        return tuple(TaskChoice(times=times, tasks=tasks) for times, tasks in known if times is not None)

    def doubt(self) -> None:
        """What was chosen since `begin` did not work or gave wrong results: forget it, so that it is measured anew."""
        for key in self._asked:
            self._earlier.pop(key, None)
            self.measured.pop(key, None)
        self.doubted |= self.used.intersection(self._asked)
        self.used -= self.doubted
        self._asked.clear()

    def _known(self, key: str) -> TaskTimes | None:
        return self.measured[key][1] if key in self.measured else self._earlier.get(key)


_looking_ahead: ContextVar[bool] = ContextVar("looking ahead", default=False)
_current: ContextVar[Choices] = ContextVar("choices", default=Choices())  # noqa: B039  # one for the process


def current() -> Choices:
    """The choices of the build that this thread works on."""
    return _current.get()


@contextmanager
def using(choices: Choices) -> Iterator[Choices]:
    """Inside the block, tasks are chosen by these."""
    before = _current.set(choices)
    try:
        yield choices
    finally:
        _current.reset(before)


@contextmanager
def looking_ahead() -> Iterator[None]:
    """Inside the block, every answer is the library's way, and nothing is measured or counted; what will be needed to
    answer otherwise is begun.
    """
    token = _looking_ahead.set(True)
    try:
        yield
    finally:
        _looking_ahead.reset(token)


def looks_ahead() -> bool:
    """Whether this is inside of `looking_ahead`."""
    return _looking_ahead.get()


def way_for(
    shape: Any,
    ways: Collection[str],
    device: torch.device,
    measure: Callable[[], TaskTimes],
    ahead: Ahead,
    **more: str,
) -> str:
    """The way to run a task of this shape, a dataclass whose fields, with `more`, name all that decides its time.

    A kind of task that no build has measured is measured now, on `device`; inside of `looking_ahead`, `ahead` is told
    the ways that will be needed. Raises what `measure` raises.
    """
    parts = {name: str(value) for name, value in asdict(shape).items()} | more | parts_here(device)
    with modes_off():
        return current().choose(parts, ways, measure, ahead)


def parts_here(device: torch.device) -> dict[str, str]:
    """The parts of a task's key that name the device and the software under it."""
    return facts(device) | {"format": str(FORMAT_VERSION)}


def fastest_of(
    task: str, times: Mapping[str, float], gain: float, failed: Mapping[str, str] = MappingProxyType({})
) -> TaskTimes:
    """What was measured, by way in microseconds, and the choice: the fastest way besides the library's, if it takes at
    most `gain` times what that takes. `failed` gives the reasons of ways that do not work.
    """
    best = min((way for way in times if way != LIBRARY), key=lambda way: times[way], default=LIBRARY)
    chosen = best if times[best] <= gain * times[LIBRARY] else LIBRARY
    return TaskTimes(task=task, times_us=tuple(times.items()), chosen=chosen, failed=tuple(failed.items()))
