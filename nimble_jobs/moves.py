"""Progress of a long step, told from wherever it is made: a download deep in the loading of a model, for instance.

A thread tells only whoever listens to that very thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[], None] | None] = ContextVar("listener", default=None)


def made() -> None:
    """This thread made progress. Does nothing where nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener()


@contextmanager
def told_to(listener: Callable[[], None]) -> Iterator[None]:
    """Inside the block each `made` of this thread calls `listener`."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)
