"""The actor: on its node it starts an ordinary worker on the device that Ray gave it, and waits until it ends.

The worker is a process of its own, so that a fault of its device or of a model reaches neither Ray's process nor other
actors. It never outlives the actor.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.client import worker_command, worker_error, worker_log
from nimble_jobs.errors import NimbleError, UsageError
from nimble_jobs.ray.order import Order, Versions
from nimble_jobs.settings.fields import without_password
from nimble_jobs.spec.units import format_duration
from nimble_jobs.store.home import identity, resolve
from nimble_jobs.store.leases import boot_id

_DATABASE = "NIMBLE_JOBS_DB"
_GRACE = "NIMBLE_JOBS_LIMITS_GRACE"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an actor is."""

    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a worker ended."""

    code: int  # as the command `worker start` returns it
    reason: str = ""  # unless the code is 0


def verdict(ends: Sequence[Ended]) -> tuple[int, str]:
    """Exit code and reason of all workers together: of the first that could not be used (2), if one could not; of the
    first, if all failed; else 0, since the others have done the work.
    """
    worst = max((ended.code for ended in ends), default=0)
    if worst < 2 and (not ends or any(ended.code == 0 for ended in ends)):
        return 0, ""
    return worst, next(ended.reason for ended in ends if ended.code == worst)


class Member:
    """One worker. Ray calls the methods on threads of one process."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def place(self) -> Place:
        """Answers once Ray has found a node for the actor."""
        return Place(host=socket.gethostname(), pid=os.getpid())

    def run(self) -> Ended:
        """Run a worker until it is asked to stop, or has been idle for too long.

        If something kills the worker, this process ends, too. Ray then starts another one, `max_restarts` times.
        """
        node = f"node {socket.gethostname()}"
        try:
            refuse_misfit(self._order)
            log_path = worker_log(resolve(self._order.home))
        except NimbleError as error:
            return Ended(code=error.exit_code, reason=f"{node}: {error}")
        with log_path.open("ab") as log, self._lock:
            if self._stopping:
                return Ended(code=0)
            # It dies with the thread that starts it, which is this one and waits below.
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter, and no word of a user
                command(self._order),
                env=environment(self._order, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        code = self._process.wait()
        if code < 0:
            os._exit(1)
        return Ended(code=code, reason=f"{node}: {worker_error(log_path)} ({log_path})" if code else "")

    def stop(self) -> None:
        """Ask the worker to stop at its next safe point."""
        with self._lock:
            self._stopping = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)


def command(order: Order) -> list[str]:
    """The command of the worker. Of all GPUs it sees only the one that Ray gave to the actor."""
    return worker_command(
        Path(order.home),
        device="cuda:0" if order.gpu else "cpu",
        max_idle_s=order.max_idle_s,
        gpu_memory_bytes=order.gpu_memory_bytes,
        parent=os.getpid(),
    )


def environment(order: Order, mine: Mapping[str, str]) -> dict[str, str]:
    """The worker's variables. A password that the node has for the same database stays."""
    theirs = {**mine, _GRACE: format_duration(order.grace_s)}
    if order.database is None:
        theirs.pop(_DATABASE, None)
    elif without_password(theirs.get(_DATABASE, "")) != order.database:
        theirs[_DATABASE] = order.database
    return theirs


def refuse_misfit(order: Order) -> None:
    """Raises UsageError if no worker of this order can run on this node, StoreError."""
    different = order.versions.difference(Versions.here())
    if different is not None:
        raise UsageError(f"found {different}; all nodes need the versions of the command that starts the workers")
    if order.sqlite is None:
        return
    home = Path(order.home)
    if boot_id() != order.sqlite.boot:
        found = "another machine than that of the state folder"
    elif not home.is_dir() or identity(home) != order.sqlite.identity:
        found = f"another state folder, or none, at {home}"
    else:
        return
    raise UsageError(
        f"found {found}; expected the same one as the command that starts the workers, because its jobs are in a "
        "SQLite file. Workers on several machines need their jobs in PostgreSQL (docs/postgresql.md)"
    )
