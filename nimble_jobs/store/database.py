"""Transactions that happen as a whole or not at all, in a SQLite file or a PostgreSQL database."""

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

from sqlalchemy import URL, Connection, Engine, create_engine, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from nimble_jobs.errors import StoreError, StoreGone, StoreTrouble
from nimble_jobs.patience import Lent
from nimble_jobs.store import migrations, postgres, sqlite, totals, uses
from nimble_jobs.store.tables import Base

log = logging.getLogger(__name__)

T = TypeVar("T")
FileId = tuple[int, int]  # device, inode
Work = Callable[[Session], object]

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
        source: str = "database",
    ) -> None:
        """`source`: where the URL is written, for messages about it."""
        self.info: dict[Any, Any] = {}  # attached to each session
        self.fences: list[Callable[[], None]] = []  # one raises if this process may no longer write
        self.url, self._engine = _opened(url, source)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.name = self.url.database or "" if self.is_sqlite else postgres.shown(self.url)
        self._patience_s = patience_s
        self._patience = patience or Lent()
        self._vouch = vouch
        self._file: FileId | None = None  # device and inode of the open SQLite file
        self._reopening = threading.Lock()
        self._pid = os.getpid()
        self._soon: list[tuple[Work, bool]] = []  # with their `beside`
        self._with_totals: list[Work] = []
        self._soon_lock = threading.Lock()
        self._identity: str | None = None
        if self.is_sqlite:
            self._busy, self._explain = sqlite.busy, sqlite.explain
            sqlite.prepare(self._engine, busy_timeout_s)
            self._reader: Engine = self._engine
            self._single: Engine = self._engine.execution_options(begin=sqlite.SINGLE)
            self._alone: Engine = self._engine.execution_options(begin=sqlite.IMMEDIATE)
            self._beside: Engine = self._alone
        else:
            self._busy, self._explain = postgres.busy, postgres.explain
            postgres.prepare(self._engine)
            self._reader = self._single = postgres.reader(self._engine)
            self._alone = postgres.writer(self._engine, postgres.ALONE)
            self._beside = postgres.writer(self._engine, postgres.BESIDE)

    def read(self, work: Callable[[Session], T], *, flush: bool = True) -> T:
        """Run `work` in a transaction that reads one state and changes none. With `flush`, pending writes go first."""
        if flush:
            self._flush_if_possible()
        return self._patience.through(lambda: self._try(lambda: self._read(work)))

    def read_one(self, work: Callable[[Connection], T]) -> T:
        """As `read`, for one statement over tables. It needs no session, and in SQLite no BEGIN, which together cost
        more than a small statement.
        """
        self._flush_if_possible()
        return self._patience.through(lambda: self._try(lambda: self._read_one(work)))

    def look(self, work: Callable[[Connection], T]) -> T:
        """As `read_one`, right before a step outside the database that only the owner of a row may take.

        It raises what `write` would raise if this process may no longer write. What waits for the next transaction goes
        on waiting: a commit would wait for the disk.
        """

        def looked() -> T:
            found = self._read_one(work)
            for check in self.fences:  # last, as the answer may have taken long
                check()
            return found

        return self._patience.through(lambda: self._try(looked))

    def write(self, work: Callable[[Session], T], *, beside: bool = False) -> T:
        """Run `work` in a transaction that holds the write lock from its start, and commit it durably.

        While another process holds the lock, the whole transaction is retried, so `work` may run more than once.
        `beside`: on PostgreSQL it may run at the same time as others that say so, because it locks every row on which
        it depends. SQLite has one writer at a time.
        """
        return self._patience.through(lambda: self._try(lambda: self._write(work, beside=beside)))

    def write_soon(self, work: Work, *, beside: bool = False) -> None:
        """Run `work` in this object's next transaction. For writes that may be lost if the process dies.

        Each commit waits for the disk several times, which is most of the cost of a small job. `beside`: as in `write`.
        """
        with self._soon_lock:
            self._soon.append((work, beside))

    def write_with_totals(self, work: Work) -> None:
        """As `write_soon`, with the next transaction that adds to `totals`, runs alone, or is there for pending writes.

        For counters that nearly every job changes. A transaction keeps such a row until it is committed, so on
        PostgreSQL those that change it are committed one after another. `totals` has such rows in any case, and its
        transactions, the ends of attempts, pay for that once. `work` locks no rows but by `uses`.
        """
        with self._soon_lock:
            self._with_totals.append(work)

    def migrate(self) -> None:
        """Bring the tables to the newest version. Cheap if they have it. Raises StoreError for an unfit server."""
        if self.read(self._looked) == migrations.NEWEST:
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
            if current is None and not (self.is_sqlite and inspect(session.connection()).get_table_names()):
                migrations.create(session.connection(), Base.metadata)
            else:
                migrations.upgrade(session.connection())
            if not self.is_sqlite:
                postgres.create_more(session.connection())

        self.write(work)

    def _looked(self, session: Session) -> str | None:
        if not self.is_sqlite:
            postgres.check_server(session.connection(), self.name)
        return version(session.connection())

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
            if mine and (self._soon or self._with_totals):
                self._patience.through(lambda: self._try(self._flush))
        finally:
            self._engine.dispose(close=mine)

    def _read(self, work: Callable[[Session], T]) -> T:
        with Session(self._reader, autoflush=False) as session:
            return work(session)

    def _read_one(self, work: Callable[[Connection], T]) -> T:
        with self._single.connect() as connection:
            return work(connection)

    def _flush_if_possible(self) -> None:
        if self._soon or self._with_totals:
            with suppress(StoreTrouble):  # pending writes can wait; a read does not depend on them
                self._try(self._flush)

    def _flush(self) -> None:
        self._write(lambda _session: None, beside=True, counters=True)

    def _write(self, work: Callable[[Session], T], *, beside: bool, counters: bool = False) -> T:
        """`counters`: also what waits for a transaction with totals."""
        for check in self.fences:
            check()
        counted: list[Work] = []
        with self._soon_lock:
            earlier, self._soon = self._soon, []
        beside = beside and all(also for _, also in earlier)
        try:
            writer = self._beside if beside else self._alone
            with Session(writer, expire_on_commit=False, info=self.info) as session, session.begin():
                for each, _ in earlier:
                    each(session)
                if not beside:  # `work` may remove what is counted
                    counted += self._count(session)
                result = work(session)
                if counters or totals.noted(session):
                    counted += self._count(session)
                totals.write(session)
                return result
        except BaseException:
            with self._soon_lock:
                self._soon[:0] = earlier
                self._with_totals[:0] = counted
            raise

    def _count(self, session: Session) -> list[Work]:
        """Do what `write_with_totals` was given, and return it."""
        with self._soon_lock:
            pending, self._with_totals = self._with_totals, []
        try:
            for each in pending:
                each(session)
            uses.write(session)
        except BaseException:
            with self._soon_lock:
                self._with_totals[:0] = pending
            raise
        return pending

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
                if self._unmoved() and not self._busy(e):
                    # A connection that was opened while the disk was read-only would stay read-only.
                    self._engine.dispose()
                    raise self._explain(e, self.name) from e
                if time.monotonic() >= deadline:
                    raise StoreTrouble(
                        f"{self.name}: locked by another process for more than {self._patience_s:g} s"
                    ) from e
            time.sleep(random.uniform(0.001, 0.02))  # noqa: S311  # spreads out those who wait; no secret

    def identity(self) -> str:
        """Names a PostgreSQL database and its schema among all others, in 32 hex digits. Raises StoreError."""
        if self._identity is None:
            self._identity = self.read(lambda session: postgres.identity(session.connection()))
        return self._identity

    @property
    def file(self) -> FileId | None:
        """Device and inode of the open SQLite file; None before the first transaction, and for other databases."""
        return self._file

    def _look(self) -> None:
        """Open the file anew if it was replaced. Raises StoreGone if it is missing, and what `vouch` raises."""
        if not self.is_sqlite:
            return
        current = file_id(self.name)
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
        current = file_id(self.name)
        if self._file is None:
            self._file = current
        return current == self._file


def _opened(url: str | URL, source: str) -> tuple[URL, Engine]:
    """The parsed URL and its engine. Raises StoreError, which shows no password."""
    try:
        if not str(url).startswith("sqlite"):
            postgres.check_url(str(url), source)
        parsed = make_url(url)
        if parsed.get_backend_name() == "postgresql":
            return parsed, postgres.create(parsed)
        if parsed.database in (None, "", ":memory:"):
            raise StoreError("the database is in memory, where other processes cannot see it; expected a file")
        return parsed, create_engine(parsed)
    except (ArgumentError, ModuleNotFoundError, ValueError) as e:  # their messages may quote a part of the URL
        about = str(e) if str(url).startswith("sqlite") else "the address cannot be read"
        raise StoreError(
            f"{source}: {about}; expected a SQLAlchemy URL such as sqlite:////absolute/path.db or "
            f"{postgres.DRIVER}://USER@HOST/DATABASE"
        ) from None


def file_id(path: str | Path) -> FileId | None:
    """Device and inode; None if there is no file."""
    try:
        info = os.stat(path)  # noqa: PTH116 - twice in each transaction
    except OSError:
        return None
    return (info.st_dev, info.st_ino)


def version(connection: Connection) -> str | None:
    """The version of the tables; None if there are none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return str(found) if found is not None else None
