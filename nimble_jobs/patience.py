"""Trouble that passes: full disks, locks that others hold, read-only moments. What it is, and how it is waited out."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from nimble_jobs.errors import StoreTrouble

T = TypeVar("T")

DEFAULT_LIMIT_S = 24 * 3600.0
TELL_AFTER_S = 3.0  # shorter trouble is nobody's business
_FIRST_S, _LONGEST_S = 0.02, 2.0  # between two tries, doubled each time
_LOOK_S = 0.1  # how often a wait asks whether it should end

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EBUSY, errno.ETIMEDOUT, errno.ENOTCONN}
_SCARCE = {errno.EMFILE, errno.ENFILE}
_IN_WORDS = re.compile(r"\(os error (\d+)\)")  # how libraries in Rust tell the number


def passes(error: BaseException, *, begun: bool = True) -> bool:
    """May the same write succeed a while later, without anybody changing the job?

    What is refused (a read-only file system, a missing permission) counts only once the job has `begun` to write there:
    before, it is the user's mistake.
    """
    cause: BaseException | None = error
    while cause is not None:
        if is_trouble(cause, "" if isinstance(cause, OSError) else str(cause), begun=begun):
            return True
        cause = cause.__cause__
    return False


def is_trouble(error: BaseException, text: str, *, begun: bool) -> bool:
    """As `passes`, of an error without its causes. `text` is what it says."""
    if isinstance(error, StoreTrouble):
        return True
    words = _IN_WORDS.search(text) if not isinstance(error, OSError) else None
    number = error.errno if isinstance(error, OSError) else int(words[1]) if words else None
    return number in _FULL | _SCARCE | (_REFUSED if begun else set())


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, what may end the wait, and who is told of it. Threads may share one."""

    limit_s: float = DEFAULT_LIMIT_S
    # asked several times a second, with the seconds waited; what it raises ends the wait
    check: Callable[[float], None] = lambda _waited_s: None
    # what is waited for once that takes a few seconds; None when it is over
    tell: Callable[[str | None], None] = lambda _text: None

    def through(self, work: Callable[[], T], *, begun: bool = True) -> T:
        """Do `work`, again and again while its trouble is of the kind that passes; it must bear being done twice.

        Raises what `work` raises otherwise, its last error after `limit_s`, and what `check` raises.
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
        """The same, but nothing ends it early: for what is finished and only has to be written down."""
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
    """The patience that the present thread has, if it was lent any; without it nothing is waited for."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def to(self, patience: Patience) -> Iterator[None]:
        """Inside the block this thread waits as `patience` says."""
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
