"""Runs the next attempt of a job, and dies by SIGKILL before the n-th step that lasts: `dying_scorer.py BASE N`.

Such steps are commits, syncs, renames, links and removals. It prints how many there were, if it lives.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.pulse import Pulse
from tests.inbox import Inbox

_LASTING = ("fsync", "rename", "replace", "link", "unlink", "rmdir")


class Steps:
    """Counts them."""

    def __init__(self, last: int) -> None:
        self.count, self._last = 0, last
        self._lock = threading.Lock()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; it is not called any more once it is this step's turn."""

        def counted(*args: Any, **named: Any) -> Any:
            with self._lock:
                self.count += 1
                if self.count == self._last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **named)

        return counted


def main() -> None:
    """Claim, score, end the job."""
    base, last = Path(sys.argv[1]), int(sys.argv[2])
    # How often progress is written on the way depends on the machine.
    Pulse.__init__.__kwdefaults__["interval_s"] = 3600.0
    with open_store(resolve(str(base / "home"))) as store:
        inbox = Inbox(store, base)
        steps = Steps(last)
        for name in _LASTING:
            setattr(os, name, steps.before(getattr(os, name)))
        event.listen(Engine, "commit", steps.before(lambda _connection: None))
        inbox.work()
        print(steps.count)


if __name__ == "__main__":
    main()
