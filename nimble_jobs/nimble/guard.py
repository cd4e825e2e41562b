"""Notices, at each call, that a module has changed since it was prepared."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

from torch import nn

from nimble_jobs.errors import EngineError
from nimble_jobs.nimble.facts import Facts

Choice = Literal["on", "off"]


class ModuleChanged(EngineError):
    """The module was changed after it was prepared; prepare it again."""


class Guard:
    """Compares a module at each call with what it was when it was prepared."""

    def __init__(self, module: nn.Module, *, training: bool, but_for: frozenset[str] = frozenset()) -> None:
        """`but_for` are the attributes, by dotted name, that the module's own calls change."""
        self._module = module
        self._facts = Facts.of(module, training=training, but_for=but_for)

    def check(self) -> None:
        """Raises ModuleChanged, which names what has changed and how. Takes microseconds if nothing was written."""
        if not self._facts.untouched():
            self._look()

    def _look(self) -> None:
        before = self._facts
        now = Facts.of(self._module, training=before.training, but_for=before.but_for)
        difference = before.difference(now)
        if difference is not None:
            raise ModuleChanged(
                f"the module changed after it was prepared, so its schedule no longer fits: {difference}; prepare again"
            )
        self._facts = now


class Gate:
    """Lets many calls run at once, or one `prepare` alone, because `prepare` changes the module while it runs."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._calls = 0
        self._preparing: int | None = None  # the thread

    def __enter__(self) -> None:
        with self._free:
            while self._preparing not in (None, threading.get_ident()):
                self._free.wait()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._free:
            self._calls -= 1
            if not self._calls:
                self._free.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no call is running. Inside, new calls from other threads wait."""
        with self._free:
            while self._calls or self._preparing is not None:
                self._free.wait()
            self._preparing = threading.get_ident()
        try:
            yield
        finally:
            with self._free:
                self._preparing = None
                self._free.notify_all()


@contextlib.contextmanager
def changed_by_calls(module: nn.Module, *, training: bool) -> Iterator[set[str]]:
    """A context for a call. Afterwards the set that it gave holds the changed attributes, by dotted name."""
    before = Facts.of(module, training=training)
    found: set[str] = set()
    yield found
    found |= before.changed(Facts.of(module, training=training))
