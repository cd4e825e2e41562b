"""Locks for builds, so that several processes that miss one key build it once.

Each key has a lock file, which its builder locks. It contains the builder's identity, and is empty while nobody builds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.patience import Lent
from nimble_jobs.store.locks import exclusive

log = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The builder that this process waits for."""

    pid: int  # 0 until it has written its identity
    waited_s: float
    limit_s: float


class Builds:
    """The folder of build locks."""

    def __init__(self, folder: Path, patience: Lent | None = None) -> None:
        self._folder = folder
        self._patience = patience or Lent()

    @contextmanager
    def turn(self, key: str, *, limit_s: float, waiting: Callable[[Wait], None]) -> Iterator[bool]:
        """Inside the block only this process builds `key`; False if another one still builds it after `limit_s`.

        `waiting` is called repeatedly meanwhile; an exception from it ends the wait. Raises StoreError.
        """
        path = self._folder / f"{key}.lock"

        def tell(waited_s: float) -> None:
            waiting(Wait(pid=_holder(path), waited_s=waited_s, limit_s=limit_s))

        with exclusive(path, poll_s=_POLL_S, limit_s=limit_s, waiting=tell, patience=self._patience) as mine:
            if mine:
                _write(path, json.dumps({"pid": os.getpid()}))
            try:
                yield mine
            finally:
                if mine:
                    _write(path, "")


def _write(path: Path, text: str) -> None:
    """Replace the file's text. A reader between the two steps sees an empty file, which does no harm."""
    try:
        with path.open("r+") as file:  # one that was removed stays so
            file.truncate()
            file.write(text)
    except OSError as e:
        log.warning("%s: %s; processes that wait for this build cannot see who builds it", path, e.strerror)


def _holder(path: Path) -> int:
    try:
        return int(json.loads(path.read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
