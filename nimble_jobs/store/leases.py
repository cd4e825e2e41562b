"""Leases of workers in a database that several machines share: who is alive, by the database's clock alone.

A worker renews its lease several times before it ends. It writes nothing in the last part of a lease, and its child
process ends itself then, so that whoever finds the lease ended can take the job. Times of this process are of a clock
that nobody sets and that goes on while the machine sleeps.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, insert, select, update

from nimble_jobs.errors import LeaseLost, StoreError
from nimble_jobs.store.changes import changed
from nimble_jobs.store.database import Database
from nimble_jobs.store.lease_table import WorkerRow
from nimble_jobs.store.records import dump

log = logging.getLogger(__name__)

LEASE_S = float(os.environ.get("NIMBLE_JOBS_LEASE_S") or 60.0)
RENEW_S = LEASE_S / 6  # between two renewals
MARGIN_S = LEASE_S / 4  # before its end, writes stop and the child is ended
_AGAIN_S = LEASE_S / 30  # before a failed renewal is tried again
_KEPT_S = 24 * 3600.0  # how long a row stays after its lease has ended
_NOW = func.extract("epoch", func.clock_timestamp())


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A worker whose lease runs."""

    id: str
    host: str
    boot: str
    folder: str
    info: dict[str, Any]


def clock_s() -> float:
    """Seconds of this machine since it was started, also while it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot_id() -> str:
    """What tells one boot of this machine from another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def folder_id(folder: Path) -> str:
    """DEVICE:INODE."""
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


class Leases:
    """The table of workers. It has connections of its own, so that nothing else holds a renewal up."""

    def __init__(self, database: Database) -> None:
        self._shared = database
        self._db = Database(database.url, patience_s=RENEW_S)

    def begin(self, worker: str, folder: Path, info: Mapping[str, Any]) -> None:
        """Enter a worker, with a lease from now on."""
        row = {"id": worker, "host": socket.gethostname(), "boot": boot_id(), "folder": folder_id(folder)}
        new = insert(WorkerRow).values(**row, lease_until=_NOW + LEASE_S, info=dump(dict(info)))
        self._db.write(lambda session: session.execute(new), beside=True)

    def renew(self, worker: str, info: Mapping[str, Any]) -> None:
        """Let the lease run anew. Raises LeaseLost if it has ended, StoreError."""
        mine = update(WorkerRow).where(WorkerRow.id == worker, WorkerRow.lease_until > _NOW)
        statement = mine.values(lease_until=_NOW + LEASE_S, info=dump(dict(info)))
        if not self._db.write(lambda session: changed(session, statement), beside=True):
            raise LeaseLost(f"worker {worker}: its lease has ended; others may have taken its job")

    def end(self, worker: str) -> None:
        """End the lease now."""
        statement = update(WorkerRow).where(WorkerRow.id == worker).values(lease_until=0.0)
        self._db.write(lambda session: changed(session, statement), beside=True)

    def left_s(self, worker: str) -> float:
        """Seconds until the lease ends, by the database's clock; 0 or less if it has."""
        left = select(WorkerRow.lease_until - _NOW).where(WorkerRow.id == worker)
        return float(self._db.read(lambda session: session.scalar(left)) or 0.0)

    def holders(self) -> list[Holder]:
        """The workers whose leases run."""
        query = select(WorkerRow).where(WorkerRow.lease_until > _NOW).order_by(WorkerRow.id)
        return self._shared.read(lambda session: [_holder(row) for row in session.scalars(query)])

    def holder(self, worker: str) -> Holder | None:
        """The worker, if its lease runs."""
        query = select(WorkerRow).where(WorkerRow.id == worker, WorkerRow.lease_until > _NOW)
        row = self._shared.read(lambda session: session.scalar(query))
        return None if row is None else _holder(row)

    def forget(self) -> None:
        """Remove the rows of workers whose leases ended long ago."""
        old = WorkerRow.lease_until < _NOW - _KEPT_S
        if self._shared.read(lambda session: session.scalar(select(WorkerRow.id).where(old).limit(1))) is not None:
            self._shared.write(lambda session: changed(session, delete(WorkerRow).where(old)))

    def fence(self, check: Callable[[], None], *, held: bool) -> None:
        """Have every write of this process's store, but not of leases, ask `check` first, which may raise; or, if the
        lease is no longer `held`, no longer.
        """
        if held:
            self._shared.fences.append(check)
        else:
            self._shared.fences.remove(check)

    def close(self) -> None:
        """Close the connections."""
        self._db.close()


class Watch:
    """Follows one lease on a thread of its own, and fences this process's writes by it.

    With `info`, which says what others are to see, it renews the lease: it is the worker's own. Otherwise, as in the
    worker's child, it only asks how long the lease still runs. `over` is called once: by a child MARGIN_S before the
    lease ends, by the worker when it has ended. Raises StoreError.
    """

    def __init__(
        self,
        leases: Leases,
        worker: str,
        *,
        info: Callable[[], Mapping[str, Any]] | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._leases, self._worker, self._info, self._over = leases, worker, info, over
        self._until_s = clock_s() + self._ask()
        self.lost = False
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"lease-{worker}", daemon=True)
        leases.fence(self.check, held=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LeaseLost if this process may no longer write."""
        if self.lost or clock_s() >= self._until_s - MARGIN_S:
            raise LeaseLost(f"worker {self._worker}: could not renew its lease; its job goes to another worker")

    def soon(self) -> None:
        """Renew now: there is news."""
        self._wake.set()

    def close(self) -> None:
        """Follow no longer."""
        self._ended = True
        self._wake.set()
        self._thread.join()
        self._leases.fence(self.check, held=False)

    def _follow(self) -> None:
        pause_s = RENEW_S if self._info is not None else RENEW_S / 2
        while not self._ended:
            left_s = math.inf if self._info is not None else max(0.0, self._until_s - MARGIN_S - clock_s())
            self._wake.wait(min(pause_s, left_s))
            self._wake.clear()
            if self._ended:
                return
            asked_s = clock_s()
            try:
                self._until_s = asked_s + self._ask()
                pause_s = RENEW_S if self._info is not None else RENEW_S / 2
            except LeaseLost as error:
                log.error("%s", error)
                self.lost = True
            except StoreError as error:
                log.warning("worker %s: its lease was not renewed: %s", self._worker, error)
                pause_s = _AGAIN_S
            if self.lost or (clock_s() >= self._until_s - MARGIN_S and self._info is None):
                self._over()
                return

    def _ask(self) -> float:
        """Seconds for which the lease runs from now on."""
        if self._info is None:
            return self._leases.left_s(self._worker)
        self._leases.renew(self._worker, self._info())
        return LEASE_S


def _holder(row: WorkerRow) -> Holder:
    try:
        info = json.loads(row.info)
    except ValueError:
        info = None
    known = info if isinstance(info, dict) else {}
    return Holder(id=row.id, host=row.host, boot=row.boot, folder=row.folder, info=known)
