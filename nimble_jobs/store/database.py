"""Transactions that happen as a whole or not at all, in a SQLite file."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, create_engine, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from nimble_jobs.errors import StoreError, StoreGone, StoreTrouble
from nimble_jobs.patience import Lent
from nimble_jobs.store import migrations, sqlite, totals
from nimble_jobs.store.tables import Base

log = logging.getLogger(__name__)

T = TypeVar("T")
FileId = tuple[int, int]  # device, inode

BUSY_TIMEOUT_S = 5.0  # how long SQLite waits for a lock
PATIENCE_S = 30.0  # how long a transaction is retried in all


class Database:
    """One database, with transactions that either happen as a whole or raise a NimbleError.

    A SQLite file is checked before and after each transaction. If another file has replaced it, everything is opened
    anew and the transaction is repeated there, unless `vouch` raises.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        patience: Lent | None = None,
        vouch: Callable[[], None] = lambda: None,
    ) -> None:
        self.info: dict[Any, Any] = {}  # attached to each session
        try:
            self.url = make_url(url)
            self.is_sqlite = self.url.get_backend_name() == "sqlite"
            if not self.is_sqlite:
                # Liveness is judged by locks on this machine. Workers elsewhere would look dead, and lose their jobs.
                raise StoreError(
                    f"NIMBLE_JOBS_DB: {self.url.get_backend_name()} is not supported; expected a SQLite file, such as "
                    "sqlite:////absolute/path.db"
                )
            if self.url.database in (None, "", ":memory:"):
                raise StoreError("the database is in memory, where other processes cannot see it; expected a file")
            self._engine = create_engine(self.url)
        except (ArgumentError, ModuleNotFoundError) as e:  # their messages name no part of the URL but a driver
            raise StoreError(
                f"NIMBLE_JOBS_DB: {e}; expected a SQLAlchemy URL such as sqlite:////absolute/path.db"
            ) from e
        self.name = self.url.database or "" if self.is_sqlite else self.url.render_as_string(hide_password=True)
        self._patience_s = patience_s
        self._patience = patience or Lent()
        self._vouch = vouch
        self._file: FileId | None = None  # device and inode of the open SQLite file
        self._reopening = threading.Lock()
        self._pid = os.getpid()
        self._soon: list[Callable[[Session], object]] = []
        self._soon_lock = threading.Lock()
        if self.is_sqlite:
            sqlite.prepare(self._engine, busy_timeout_s)
        self._writer = self._engine.execution_options(begin=sqlite.IMMEDIATE)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction that reads one consistent state and changes nothing."""
        if self._soon:
            with suppress(StoreTrouble):  # pending writes can wait; the read does not depend on them
                self._try(lambda: self._write(lambda _session: None))
        return self._patience.through(lambda: self._try(lambda: self._read(work)))

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction that holds the write lock from its start, and commit it durably.

        While another process holds the lock, the whole transaction is retried, so `work` may run more than once.
        """
        return self._patience.through(lambda: self._try(lambda: self._write(work)))

    def write_soon(self, work: Callable[[Session], object]) -> None:
        """Run `work` in this object's next transaction. For writes that may be lost if the process dies.

        Each commit waits for the disk several times, which is most of the cost of a small job.
        """
        with self._soon_lock:
            self._soon.append(work)

    def migrate(self) -> None:
        """Bring the tables to the newest version. Cheap if they have it."""
        if self.read(lambda session: version(session.connection())) == migrations.NEWEST:
            return

        def work(session: Session) -> None:
            current = version(session.connection())  # check again, since another process may have been first
            if current == migrations.NEWEST:
                return
            if current is not None and current > migrations.NEWEST:
                raise StoreError(
                    f"{self.name}: made by a newer nimble-jobs (database version {current}, this one reads up to "
                    f"{migrations.NEWEST}); install that version, or choose another folder with --home"
                )
            if inspect(session.connection()).get_table_names():
                migrations.upgrade(session.connection())
            else:
                migrations.create(session.connection(), Base.metadata)

        self.write(work)

    def compact(self) -> None:
        """Return free space in a SQLite file to the disk, by rewriting the file in one transaction.

        Other databases do this by themselves. Raises StoreError, also if there is no room for a second file.
        """
        if self.is_sqlite:
            self._try(lambda: sqlite.vacuum(self._engine))

    def free_bytes(self) -> int:
        """Free bytes of a SQLite file that could be returned to the disk; 0 for other databases."""
        if not self.is_sqlite:
            return 0
        return self.read(sqlite.free_bytes)

    def give_back(self, pages: int) -> bool:
        """Cut at most this many free pages off a SQLite file, in one transaction. Returns whether there are more.

        Files of earlier versions cannot shrink in this way until `compact` has rewritten them.
        """
        if not self.is_sqlite:
            return False

        return self.write(lambda session: sqlite.give_back(session, pages))

    def close(self) -> None:
        """Do pending writes, and close every connection."""
        mine = os.getpid() == self._pid
        try:
            if mine and self._soon:
                self.write(lambda _session: None)
        finally:
            self._engine.dispose(close=mine)

    def _read(self, work: Callable[[Session], T]) -> T:
        with Session(self._engine, autoflush=False) as session:
            return work(session)

    def _write(self, work: Callable[[Session], T]) -> T:
        with self._soon_lock:
            earlier, self._soon = self._soon, []
        try:
            with Session(self._writer, expire_on_commit=False, info=self.info) as session, session.begin():
                for each in earlier:
                    each(session)
                result = work(session)
                totals.write(session)
                return result
        except BaseException:
            with self._soon_lock:
                self._soon[:0] = earlier
            raise

    def _try(self, transaction: Callable[[], T]) -> T:
        if os.getpid() != self._pid:
            raise StoreError("a database connection must not cross a fork; open the store in the process that uses it")
        deadline = time.monotonic() + self._patience_s
        while True:
            self._look()
            try:
                result = transaction()
                if self._unmoved():
                    return result
            except IntegrityError:
                if self._unmoved():
                    raise
            except (DBAPIError, sqlite3.Error) as e:
                if self._unmoved() and not sqlite.busy(e):
                    # A connection that was opened while the disk was read-only would stay read-only.
                    self._engine.dispose()
                    raise sqlite.explain(e, self.name) from e
                if time.monotonic() >= deadline:
                    raise StoreTrouble(
                        f"{self.name}: locked by another process for more than {self._patience_s:g} s"
                    ) from e
            time.sleep(random.uniform(0.001, 0.02))  # noqa: S311  # spreads out those who wait; no secret

    @property
    def file(self) -> FileId | None:
        """Device and inode of the open SQLite file; None before the first transaction, and for other databases."""
        return self._file

    def _look(self) -> None:
        """Open the file anew if it was replaced. Raises StoreGone if it is missing, and what `vouch` raises."""
        if not self.is_sqlite:
            return
        current = file_id(Path(self.name))
        if current == self._file and current is not None:
            return
        with self._reopening:
            if self._file is None:  # the first transaction may make the file
                self._file = current
                return
            if current is None:
                raise StoreGone(f"{self.name}: the database is gone; put it back to continue")
            self._vouch()
            self._engine.dispose()
            self._file = current
        log.warning("%s: the file was replaced; the new one is used from now on", self.name)

    def _unmoved(self) -> bool:
        """Whether the last transaction happened in the file that is at the path now."""
        if not self.is_sqlite:
            return True
        current = file_id(Path(self.name))
        if self._file is None:
            self._file = current
        return current == self._file


def file_id(path: Path) -> FileId | None:
    """Device and inode; None if there is no file."""
    try:
        info = path.stat()
    except OSError:
        return None
    return (info.st_dev, info.st_ino)


def version(connection: Connection) -> str | None:
    """The version of the tables; None if there are none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return str(found) if found is not None else None
