"""Recognises trouble that passes (full disks, locks that others hold, read-only moments) and waits until it is over."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from nimble_jobs.errors import ObjectTrouble, StoreTrouble

T = TypeVar("T")

DEFAULT_LIMIT_S = 24 * 3600.0
TELL_AFTER_S = 3.0  # shorter trouble is not reported
_FIRST_S, _LONGEST_S = 0.02, 2.0  # between two tries, doubled each time
_LOOK_S = 0.1  # how often a wait checks whether it should end

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EBUSY, errno.ETIMEDOUT, errno.ENOTCONN}
_SCARCE = {errno.EMFILE, errno.ENFILE}
_IN_WORDS = re.compile(r"\(os error (\d+)\)")  # how libraries written in Rust report the number


def passes(error: BaseException, *, begun: bool = True) -> bool:
    """Whether the same write may succeed later, without a change to the job.

    A refusal (a read-only file system, a missing permission) only counts if the job has `begun` to write there. Before
    that, it is the user's mistake.
    """
    cause: BaseException | None = error
    while cause is not None:
        if is_trouble(cause, "" if isinstance(cause, OSError) else str(cause), begun=begun):
            return True
        cause = cause.__cause__
    return False


def is_trouble(error: BaseException, text: str, *, begun: bool) -> bool:
    """As `passes`, for one error without its causes. `text` is its message."""
    if isinstance(error, StoreTrouble | ObjectTrouble):
        return True
    words = _IN_WORDS.search(text) if not isinstance(error, OSError) else None
    number = error.errno if isinstance(error, OSError) else int(words[1]) if words else None
    return number in _FULL | _SCARCE | (_REFUSED if begun else set())


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, what may end the wait, and how to report it. Threads may share one."""

    limit_s: float = DEFAULT_LIMIT_S
    # asked several times a second, with the seconds waited; what it raises ends the wait
    check: Callable[[float], None] = lambda _waited_s: None
    # what is waited for once that takes a few seconds; None when it is over
    tell: Callable[[str | None], None] = lambda _text: None

    def through(self, work: Callable[[], T], *, begun: bool = True) -> T:
        """Do `work`, and repeat it while it fails with trouble that passes. It must be safe to repeat.

        Raises any other error of `work`, its last error after `limit_s` seconds, and what `check` raises.
        """
        start = time.monotonic()
        pause_s, told = _FIRST_S, False
        try:
            while True:
                try:
                    return work()
                except Exception as error:
                    waited_s = time.monotonic() - start
                    if not passes(error, begun=begun) or waited_s >= self.limit_s:
                        raise
                    if waited_s >= TELL_AFTER_S and not told:
                        told = True
                        self.tell(str(error))
                self._sleep(start, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
        finally:
            if told:
                self.tell(None)

    def unconditional(self) -> Patience:
        """The same patience, but nothing ends it early: for finished work that only has to be recorded."""
        return replace(self, check=lambda _waited_s: None)

    def _sleep(self, start: float, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while True:
            now = time.monotonic()
            self.check(now - start)
            if now >= until:
                return
            time.sleep(min(_LOOK_S, until - now))


NONE = Patience(limit_s=0.0)


class Lent:
    """The patience that was lent to the current thread. Without one, nothing waits."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def to(self, patience: Patience) -> Iterator[None]:
        """A context in which this thread waits with `patience`."""
        before = getattr(self._local, "patience", None)
        self._local.patience = patience
        try:
            yield
        finally:
            self._local.patience = before

    def through(self, work: Callable[[], T]) -> T:
        """Do `work` with the thread's patience."""
        patience: Patience | None = getattr(self._local, "patience", None)
        return work() if patience is None else patience.through(work)
