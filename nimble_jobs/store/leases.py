"""Leases of workers in a database that several machines share: who is alive, by the database's clock alone.

A worker renews its lease several times before it ends. In the last part of a lease, neither it nor its child process
writes anything until the lease is renewed. A lease that has ended is renewed too, as after an outage of the database,
unless another worker has buried its holder, which it does before it takes anything away. The row in the table decides
between the two, so whoever renewed a lease has lost nothing, and whoever was buried never writes again under that id.

Times of this process are of a clock that nobody sets and that goes on while the machine sleeps.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, insert, or_, select, true, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import LeaseLost, StoreError, StoreTrouble
from nimble_jobs.store.changes import changed
from nimble_jobs.store.database import Database
from nimble_jobs.store.lease_table import WorkerRow
from nimble_jobs.store.records import dump

log = logging.getLogger(__name__)

LEASE_S = float(os.environ.get("NIMBLE_JOBS_LEASE_S") or 60.0)
RENEW_S = LEASE_S / 6  # between two renewals
MARGIN_S = LEASE_S / 4  # before its end, writes stop; who was not seen to renew it for so long may be buried then
_AGAIN_S = LEASE_S / 30  # before a failed renewal is tried again
_KEPT_S = 24 * 3600.0  # how long a row stays after its lease has ended
_NOW = func.extract("epoch", func.clock_timestamp())
_BURIED = 0.0  # in the place of a lease's end: it is never renewed


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A worker whose lease runs."""

    id: str
    host: str
    boot: str
    folder: str
    info: dict[str, Any]
    left_s: float | None = None  # for how long the lease runs; None if that was not asked for


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

    def renew(self, worker: str, info: Mapping[str, Any]) -> bool:
        """Let the lease run anew. False if it had ended. Raises LeaseLost if the worker was buried, StoreError."""

        def work(session: Session) -> bool:
            mine = select(WorkerRow.lease_until > _NOW).where(WorkerRow.id == worker, WorkerRow.lease_until != _BURIED)
            ran = session.scalar(mine.with_for_update())
            if ran is None:
                raise LeaseLost(f"worker {worker}: its lease has ended, and another worker took what it had")
            new = {"lease_until": _NOW + LEASE_S, "suspected_at": None, "info": dump(dict(info))}
            changed(session, update(WorkerRow).where(WorkerRow.id == worker).values(**new))
            return bool(ran)

        return self._db.write(work, beside=True)

    def end(self, worker: str) -> None:
        """End the lease now, for good."""
        statement = update(WorkerRow).where(WorkerRow.id == worker).values(lease_until=_BURIED)
        self._db.write(lambda session: changed(session, statement), beside=True)

    def left_s(self, worker: str) -> float:
        """Seconds until the lease ends, by the database's clock; 0 or less if it has. Raises LeaseLost if the worker
        was buried, StoreError.
        """
        left = select(WorkerRow.lease_until - _NOW).where(WorkerRow.id == worker, WorkerRow.lease_until != _BURIED)
        found = self._db.read(lambda session: session.scalar(left))
        if found is None:
            raise LeaseLost(f"worker {worker}: its lease has ended, and another worker may have taken what it had")
        return float(found)

    def suspect(self) -> None:
        """Note since when leases are about to end or have ended, for `bury`.

        After an outage of the database, all leases may have ended. Their holders get MARGIN_S from here to renew them.
        """
        late = (WorkerRow.lease_until != _BURIED, WorkerRow.lease_until < _NOW + MARGIN_S)
        new = (*late, WorkerRow.suspected_at.is_(None))
        if self._shared.read(lambda session: session.scalar(select(WorkerRow.id).where(*new).limit(1))) is not None:
            mark = update(WorkerRow).where(*new).values(suspected_at=_NOW)
            self._shared.write(lambda session: changed(session, mark), beside=True)

    def bury(self, worker: str, *, certain: bool) -> bool:
        """End a lease for good if it has ended and its holder was suspected for MARGIN_S. `certain`: whatever it says.

        True if the worker will never write again: what it had is free.
        """
        late = (WorkerRow.lease_until <= _NOW) & (WorkerRow.suspected_at <= _NOW - MARGIN_S)
        over = true() if certain else or_(WorkerRow.lease_until == _BURIED, late)

        def dead(session: Session, *, lock: bool) -> bool:
            query = select(over).select_from(WorkerRow).where(WorkerRow.id == worker)
            found = session.scalar(query.with_for_update() if lock else query)
            return found is None or bool(found)

        def work(session: Session) -> bool:
            gone = dead(session, lock=True)
            if gone:
                changed(session, update(WorkerRow).where(WorkerRow.id == worker).values(lease_until=_BURIED))
            return gone

        # Read first, so that nobody writes for a worker that others are still to wait for.
        return self._shared.read(lambda session: dead(session, lock=False)) and self._shared.write(work, beside=True)

    def holders(self) -> list[Holder]:
        """The workers whose leases run."""
        running = WorkerRow.lease_until > _NOW
        query = select(WorkerRow, WorkerRow.lease_until - _NOW).where(running).order_by(WorkerRow.id)
        return self._shared.read(lambda session: [_holder(row, left_s) for row, left_s in session.execute(query)])

    def holder(self, worker: str, *, ended: bool = False) -> Holder | None:
        """The worker, if its lease runs, or even if it has `ended`."""
        query = select(WorkerRow).where(WorkerRow.id == worker, true() if ended else WorkerRow.lease_until > _NOW)
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
    worker's child, it only asks how long the lease still runs. `over` is called once, when the worker was buried.
    Raises StoreError.
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
        """Raises LeaseLost if this process may never write again, StoreTrouble if not before the lease is renewed."""
        if self.lost:
            raise LeaseLost(f"worker {self._worker}: its lease has ended, and another worker took what it had")
        if self._late():
            raise StoreTrouble(
                f"worker {self._worker}: its lease could not be renewed; it writes nothing until the database answers"
            )

    def soon(self) -> None:
        """Renew now: there is news."""
        self._wake.set()

    def stop(self) -> None:
        """Follow no longer. What this process writes from now on is fenced by what was known last."""
        self._ended = True
        self._wake.set()
        self._thread.join()

    def close(self) -> None:
        """Follow no longer, and lift the fence."""
        self.stop()
        self._leases.fence(self.check, held=False)

    def _late(self) -> bool:
        return clock_s() >= self._until_s - MARGIN_S

    def _follow(self) -> None:
        usual_s = RENEW_S if self._info is not None else RENEW_S / 2
        pause_s, troubled = usual_s, False
        while not self._ended:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._ended:
                return
            asked_s = clock_s()
            try:
                self._until_s = asked_s + self._ask()
            except LeaseLost as error:
                log.error("%s", error)
                self.lost = True
                self._over()
                return
            except StoreError as error:
                if not troubled:
                    log.warning("worker %s: its lease was not renewed: %s", self._worker, error)
                pause_s, troubled = _AGAIN_S, True
            else:
                pause_s, troubled = _AGAIN_S if self._late() else usual_s, False

    def _ask(self) -> float:
        """Seconds for which the lease runs from now on."""
        if self._info is None:
            return self._leases.left_s(self._worker)
        if not self._leases.renew(self._worker, self._info()):
            log.warning("worker %s: its lease had ended; nobody took its jobs, so they go on", self._worker)
        return LEASE_S


def _holder(row: WorkerRow, left_s: float | None = None) -> Holder:
    try:
        info = json.loads(row.info)
    except ValueError:
        info = None
    known = info if isinstance(info, dict) else {}
    return Holder(id=row.id, host=row.host, boot=row.boot, folder=row.folder, info=known, left_s=left_s)
