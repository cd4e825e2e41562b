"""Which state folder a SQLite database belongs to. Workers are known by locks in their folder, so it has one folder.

The database in the folder itself is its own. Any other file keeps the id of the first folder that opened it, and where
that was. The id moves with the folder, and is in its copies: the one that is still where it was noted is the owner.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from sqlalchemy import Column, Connection, MetaData, Table, inspect, select, text
from sqlalchemy.dialects.sqlite.base import SQLiteDialect

from nimble_jobs.errors import StoreError, StoreTrouble
from nimble_jobs.store import home as home_module
from nimble_jobs.store.database import Database
from nimble_jobs.store.words import FileName
from nimble_jobs.store.workers import Workers

# It is in no migration: most SQLite files, and all of PostgreSQL, do not have it.
_OWNER = Table("state_folder", MetaData(), Column("id", FileName, nullable=False), Column("folder", FileName))


class Owner(NamedTuple):
    """A state folder as a database knows it."""

    id: str
    folder: Path  # where it was when this was noted


def refuse_others(database: Database, home: Path) -> bool:
    """Whether the database does not know yet that it belongs to this state folder; then `take` it. Changes nothing.

    Raises StoreError if it belongs to another one.
    """
    path = Path(database.name)

    def judge(connection: Connection) -> bool:
        owner = _read(connection)
        _judge(connection, owner, path, home)
        if _inside(path, home):
            return owner is not None and owner.id != home_module.folder_id(home)
        return owner != Owner(home_module.folder_id(home) or "", home)

    return database.read(lambda session: judge(session.connection()))


def take(database: Database, home: Path) -> None:
    """Note that the database, whose tables exist, belongs to this state folder. Raises StoreError."""
    me = Owner(home_module.named(home), home)

    def write(connection: Connection) -> None:
        # Again, since another folder may have been first.
        _judge(connection, _read(connection), Path(database.name), home)
        _OWNER.create(connection, checkfirst=True)
        connection.execute(_OWNER.delete())
        connection.execute(_OWNER.insert().values(id=me.id, folder=str(me.folder)))

    database.write(lambda session: write(session.connection()))


def refuse_other_file(path: Path, home: Path) -> None:
    """As `refuse_others`, for a file that has just taken the place of the open one. Raises StoreError."""
    if _inside(path, home):
        return
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_OWNER.name,)).fetchone():
                return
            row = connection.execute("SELECT id, folder FROM state_folder").fetchone()
    except sqlite3.Error as e:
        raise StoreTrouble(f"{path}: cannot be read ({e})") from e
    if row is not None:
        folder = FileName().process_result_value(row[1], SQLiteDialect())
        _compare(Owner(row[0], Path(folder or "")), path, home)


def _judge(connection: Connection, owner: Owner | None, path: Path, home: Path) -> None:
    if _inside(path, home):
        other = owner is not None and owner.id != home_module.folder_id(home)
        if other and owner is not None and _still_there(owner) and Workers(owner.folder / "workers").live():
            raise _refusal(owner, path, home, hint="stop the workers there first")
        return
    other_home = path.resolve().parent
    if path.resolve().name == home_module.DATABASE and (other_home / home_module.MARKER).exists():
        raise _refusal(Owner("", other_home), path, home)
    if owner is None or _replaced(owner, home):
        _refuse_running(connection, path, home)
    else:
        _compare(owner, path, home)


def _replaced(owner: Owner, home: Path) -> bool:
    """Whether the folder lies where the owner lay and has another id, as one that was removed and made anew."""
    return owner.id != home_module.folder_id(home) and _same(owner.folder, home)


def _compare(owner: Owner, path: Path, home: Path) -> None:
    if owner.id != home_module.folder_id(home):
        gone = f"if {owner.folder} is gone, move the file to {home / home_module.DATABASE}, without `database`"
        raise _refusal(owner, path, home, hint="" if owner.folder.exists() else gone)
    if _still_there(owner) and not _same(owner.folder, home):
        raise _refusal(owner, path, home, hint=f"{home} is a copy of it")


def _refuse_running(connection: Connection, path: Path, home: Path) -> None:
    """For a file whose folder is not known, as one of an earlier version: a job may run in a worker of another one."""
    if not inspect(connection).has_table("jobs"):
        return
    workers = Workers(home / "workers")
    running = text("SELECT id, worker FROM jobs WHERE state = 'running' AND worker IS NOT NULL ORDER BY seq")
    for job, worker in connection.execute(running):
        if not workers.known(worker):
            raise StoreError(
                f"{path}: its job {job} runs, but not in a worker that state folder {home} knows; open it with the "
                "state folder of that worker first, to which it then belongs. Or stop all of its workers, and move "
                f"the file to {home / home_module.DATABASE}, without `database`"
            )


def _refusal(owner: Owner, path: Path, home: Path, *, hint: str = "") -> StoreError:
    return StoreError(
        f"{path}: belongs to state folder {owner.folder}, not to {home}{hint and f' ({hint})'}; expected --home "
        f"{owner.folder}, or another database. Several state folders can share a PostgreSQL database"
    )


def _read(connection: Connection) -> Owner | None:
    if not inspect(connection).has_table(_OWNER.name):
        return None
    row = connection.execute(select(_OWNER)).first()
    return None if row is None else Owner(row.id, Path(row.folder))


def _inside(path: Path, home: Path) -> bool:
    """Whether this is the database that the folder has by default, and not a link to another place."""
    return path.resolve() == home.resolve() / home_module.DATABASE


def _still_there(owner: Owner) -> bool:
    try:
        return home_module.folder_id(owner.folder) == owner.id
    except (OSError, StoreError):
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
