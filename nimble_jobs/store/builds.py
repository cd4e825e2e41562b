"""Who builds which schedule right now, so that several who miss on one key build it once.

Each key has a lock file, held by its builder. It holds who that is, and is empty while nobody builds.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.patience import Lent
from nimble_jobs.store.locks import EXCLUSIVE, Lock

log = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A builder that somebody waits for."""

    pid: int  # 0 while it has not written its name yet
    waited_s: float
    limit_s: float


class Builds:
    """The folder of build locks."""

    def __init__(self, folder: Path, patience: Lent | None = None) -> None:
        self._folder = folder
        self._patience = patience or Lent()

    @contextmanager
    def turn(self, key: str, *, limit_s: float, waiting: Callable[[Wait], None]) -> Iterator[bool]:
        """Inside the block this process alone builds `key`; False where another one still did so after `limit_s`.

        `waiting` is called again and again meanwhile; what it raises ends the wait. Raises StoreError.
        """
        with self._patience.through(lambda: Lock(self._folder / f"{key}.lock")) as lock:
            mine = self._wait(lock, limit_s, waiting)
            if mine:
                self._write(lock, {"pid": os.getpid()})
            try:
                yield mine
            finally:
                if mine:
                    self._write(lock, {})

    def _wait(self, lock: Lock, limit_s: float, waiting: Callable[[Wait], None]) -> bool:
        start = time.monotonic()
        while not lock.take(EXCLUSIVE):
            waited_s = time.monotonic() - start
            if waited_s >= limit_s:
                return False
            waiting(Wait(pid=_holder(lock), waited_s=waited_s, limit_s=limit_s))
            time.sleep(min(_POLL_S, limit_s - waited_s))
        return True

    def _write(self, lock: Lock, info: Mapping[str, Any]) -> None:
        """Replace what the file says. Whoever reads it between the two steps finds nothing, which it can bear."""
        try:
            lock.write(json.dumps(dict(info)).encode() if info else b"")
        except OSError as e:
            log.warning("%s: %s; those who wait for this build are not told whose it is", lock.path, e.strerror)


def _holder(lock: Lock) -> int:
    try:
        return int(json.loads(lock.read())["pid"])
    except (ValueError, KeyError, TypeError):
        return 0
