"""A fixed number of things that the stages of a pipeline share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    """A fixed number of things that stages take and give back. Any thread may do either."""

    def __init__(self, things: Iterable[T]) -> None:
        self._things = tuple(things)
        self._changed = threading.Condition()
        self._free: deque[T] = deque(self._things)
        self._ended = False
        self._round = 0

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def begin(self) -> None:
        """Take all back and offer them anew. Nobody may use one that was taken before."""
        with self._changed:
            self._round += 1
            self._free = deque(self._things)
            self._ended = False

    def end(self) -> None:
        """Give out no more, so that nobody waits for one in vain."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self) -> tuple[T, Callable[[], None]] | None:
        """A free one, waiting for it, and what gives it back, once; None after `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._ended)
            if self._ended:
                return None
            thing = self._free.popleft()
            return thing, _Once(partial(self._give_back, self._round, thing))

    def _give_back(self, when: int, thing: T) -> None:
        with self._changed:
            if when == self._round:
                self._free.append(thing)
                self._changed.notify()


class _Once:
    """Calls something the first time that it is called."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
