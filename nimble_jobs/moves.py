"""Reports progress of a long step from deep inside it, such as a download while a model is loaded.

A thread's reports reach only listeners of the same thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[], None] | None] = ContextVar("listener", default=None)


def made() -> None:
    """Report that this thread has made progress. Does nothing if nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener()


@contextmanager
def told_to(listener: Callable[[], None]) -> Iterator[None]:
    """A context in which each `made` of this thread calls `listener`."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)
