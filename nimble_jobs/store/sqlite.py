"""What SQLite needs: settings of each connection, a fair wait for the write lock, free pages, and what errors mean."""

from __future__ import annotations

import random
import sqlite3
import time

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from nimble_jobs.errors import Damaged, NimbleError, StoreError, StoreTrouble

IMMEDIATE = "BEGIN IMMEDIATE"  # a transaction that has the write lock from its start
SINGLE = ""  # no BEGIN: a statement that reads is a transaction by itself
_ASK_S = (0.001, 0.004)  # between two tries for the write lock
_INCREMENTAL = 2  # of PRAGMA auto_vacuum
_WAL_IS_SOUND = (3, 51, 3)  # older versions can lose committed pages when the log is reset


def journal_mode() -> str:
    """The journal mode in which this version of SQLite does not corrupt databases.

    A rollback journal is emptied, not removed: that is quicker, and needs no sync of the folder to be durable.
    """
    return "WAL" if sqlite3.sqlite_version_info >= _WAL_IS_SOUND else "TRUNCATE"


def prepare(engine: Engine, busy_timeout_s: float) -> None:
    """Set up every connection. One whose execution option `begin` is IMMEDIATE waits for the write lock. One whose
    option is SINGLE must do no more than one statement.
    """

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN would come too late and be deferred
        # A damaged text must be readable, so that its digest shows the damage.
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        cursor = connection.cursor()
        try:
            cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
            if cursor.execute("PRAGMA page_count").fetchone()[0] == 0:  # on any other file it would write
                cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
            wanted = journal_mode()
            mode = cursor.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0]
            if mode.upper() != wanted:
                raise StoreError(f"the database's journal mode is {mode} and could not be set to {wanted}")
            cursor.execute("PRAGMA synchronous = FULL")
            cursor.execute("PRAGMA foreign_keys = ON")
            cursor.execute("PRAGMA trusted_schema = OFF")
        finally:
            cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        statement = connection.get_execution_options().get("begin", "BEGIN")
        if statement == IMMEDIATE:
            _await_lock(connection, busy_timeout_s)
        elif statement != SINGLE:
            connection.exec_driver_sql(statement)


def _await_lock(connection: Connection, timeout_s: float) -> None:
    """Begin a transaction with the write lock, which may take `timeout_s`.

    SQLite itself polls the lock as rarely as every 100 ms. A waiter then misses the gaps between the short transactions
    of others, and waits for seconds. This function polls every few milliseconds. A commit still waits inside SQLite,
    where it keeps new readers out.
    """
    cursor = connection.connection.cursor()
    deadline = time.monotonic() + timeout_s
    cursor.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                cursor.execute(IMMEDIATE)
            except sqlite3.OperationalError as e:
                if not busy(e) or time.monotonic() >= deadline:
                    connection.exec_driver_sql(IMMEDIATE)  # raises it as a SQLAlchemy error
                    return
            else:
                return
            time.sleep(random.uniform(*_ASK_S))  # noqa: S311  # spreads out those who wait; no secret
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {round(timeout_s * 1000)}")
        cursor.close()


def vacuum(engine: Engine) -> None:
    """Write the file anew without its free pages."""
    connection = engine.raw_connection()
    try:
        # Takes effect with VACUUM, for files of earlier versions.
        connection.cursor().execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.cursor().execute("VACUUM")
        # Until then the new pages are in the log.
        connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()


def free_bytes(session: Session) -> int:
    """Bytes of the file that hold nothing."""
    return _pragma(session, "freelist_count") * _pragma(session, "page_size")


def give_back(session: Session, pages: int) -> bool:
    """Cut at most that many free pages off the file. Are there more? A file that cannot shrink so stays as it is."""
    if _pragma(session, "auto_vacuum") != _INCREMENTAL:
        return False
    cursor = session.connection().connection.cursor()
    for _ in range(min(pages, _pragma(session, "freelist_count"))):
        cursor.execute("PRAGMA incremental_vacuum(1)")  # each call of Python's module does one step, which is one page
    return _pragma(session, "freelist_count") > 0


def _pragma(session: Session, name: str) -> int:
    return int(session.connection().exec_driver_sql(f"PRAGMA {name}").scalar_one())


def _driver_error(error: Exception) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error


def busy(error: Exception) -> bool:
    """Did another transaction have the lock?"""
    cause = _driver_error(error)
    code = getattr(cause, "sqlite_errorcode", None)
    if code is not None:  # the low byte is the primary code; the high bytes hold variants such as BUSY_SNAPSHOT
        return (code & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return getattr(cause, "sqlstate", None) in ("40001", "40P01")  # serialization failure, deadlock


def explain(error: Exception, name: str) -> NimbleError:
    """The error for users that a driver's error stands for."""
    cause = _driver_error(error)
    match (getattr(cause, "sqlite_errorcode", None) or 0) & 0xFF:
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_FORMAT:
            return Damaged(f"{name}: damaged ({cause}); restore a backup, or move it and home.json away to start over")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return StoreTrouble(
                f"{name}: cannot be written ({cause}); make it writable, or choose another folder with --home"
            )
        case sqlite3.SQLITE_CANTOPEN:
            return StoreTrouble(f"{name}: cannot be opened ({cause}); check that its folder exists and is writable")
        case sqlite3.SQLITE_FULL:
            return StoreTrouble(f"{name}: no space left on its disk; the change was not stored")
        case sqlite3.SQLITE_IOERR:
            return StoreTrouble(f"{name}: the disk reported an error ({cause}); the change was not stored")
        case _:
            return StoreError(f"{name}: {type(cause).__name__}: {cause}")
