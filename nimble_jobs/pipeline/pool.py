"""Things that the stages of a pipeline share, as many as there are."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    """Items that stages take and give back, from any thread."""

    def __init__(self, things: Iterable[T]) -> None:
        self._things = tuple(things)
        self._changed = threading.Condition()
        self._free: deque[T] = deque(self._things)
        self._ended = False
        self._round = 0

    @property
    def free(self) -> int:
        """How many items are free."""
        return len(self._free)

    def grow(self, things: Iterable[T]) -> None:
        """Add items, which are free."""
        with self._changed:
            more = tuple(things)
            self._things += more
            self._free.extend(more)
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        """All items, free or not."""
        return iter(self._things)

    def __len__(self) -> int:
        """How many items there are, free or not."""
        return len(self._things)

    def begin(self) -> None:
        """Make all items free again. Items taken earlier may no longer be in use."""
        with self._changed:
            self._round += 1
            self._free = deque(self._things)
            self._ended = False

    def end(self) -> None:
        """Hand out no more items, and wake all threads that wait for one."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self) -> tuple[T, Callable[[], None]] | None:
        """Wait for a free item; the item, and a function that gives it back. None after `end`.

        Only the first call of the function counts.
        """
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
    """Passes on the first call only."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
