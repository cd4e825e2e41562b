"""The open store: one state folder, one database."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from nimble_jobs.errors import StoreError
from nimble_jobs.job import Job
from nimble_jobs.patience import Lent, Patience
from nimble_jobs.store import cap, owner
from nimble_jobs.store import home as home_module
from nimble_jobs.store.check import problems_of
from nimble_jobs.store.contents import Contents
from nimble_jobs.store.database import BUSY_TIMEOUT_S, PATIENCE_S, Database, FileId
from nimble_jobs.store.figures import Figures, read_figures
from nimble_jobs.store.postgres_health import ServerFact, look
from nimble_jobs.store.records import ScheduleEntry
from nimble_jobs.store.watch import Watch


class Store(Contents):
    """An open state folder. It belongs to one process; its threads may share it."""

    @property
    def database_file(self) -> FileId | None:
        """Device and inode of the open SQLite file; None for other databases."""
        return self._database.file

    @property
    def is_shared(self) -> bool:
        """Whether other state folders may use the same database: a SQLite file belongs to one."""
        return not self._database.is_sqlite

    def patient(self, patience: Patience) -> AbstractContextManager[None]:
        """Inside the block this thread waits if the store is full, locked, read-only or missing."""
        return self._patience.to(patience)

    def recover(self, now: float) -> list[Job]:
        """End the attempts of workers that are gone for good, and forget their residents. Returns the jobs."""

        def may_return() -> Callable[[str], bool]:
            dead = self.workers.dead()
            return lambda worker: not dead(worker)

        lost = self.shards.recover(may_return(), now)
        lost += self.jobs.recover(may_return(), now)
        self.schedules.forget_residents(may_return())
        self.orders.forget(may_return())
        self.workers.forget()
        return lost

    def guard(self) -> None:
        """Check again that others cannot write here, since a process may run for weeks. Raises StateFolderRefused."""
        for folder in (self.home, self.home / "artifacts"):
            self._patience.through(partial(home_module.guard, folder))

    def server(self) -> tuple[str, list[ServerFact]] | None:
        """The shared database's address, without a password, and what its server is like; None for a SQLite file."""
        if self._database.is_sqlite:
            return None
        return self._database.name, self._database.write(look, beside=True)

    def figures(self, now: float, *, names: int) -> Figures:
        """What metrics tell about the store at `now`, in Unix seconds.

        At most `names` groups and as many timers, the first ones by name, have entries of their own.
        """
        return read_figures(self._database, now, names=names)

    def check(self, *, newest: int | None = None) -> list[str]:
        """One line for each problem; empty if the store is sound. Reads every byte of it.

        With `newest`, only that many of the newest jobs and the running ones are read, which is quick even among many.
        """
        return problems_of(self, self._database, newest=newest)

    def keep_to_size(self, now: float, *, in_use: Collection[str] = ()) -> tuple[ScheduleEntry, ...]:
        """Call after a save: removes artifacts that no schedule needs, and the least recently used schedules over
        cache.size. Returns these schedules.
        """
        return cap.keep(self, now, in_use=in_use)

    def watch(self) -> Watch:
        """For one thread that asks again and again whether anything has changed. To be closed by the caller."""
        return Watch(self._database)

    def compact(self) -> None:
        """Shrink the database file to its contents. If this raises StoreError, nothing has changed."""
        self._database.compact()

    def close(self) -> None:
        """Close the database."""
        self.workers.close()
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(
    home: Path,
    url: str | None = None,
    *,
    create: bool = True,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> Store:
    """Open the store in a folder from `home.resolve`; create the database or bring it up to date if needed.

    `url`: another database, by SQLAlchemy URL; by default NIMBLE_JOBS_DB, then `database` of config.yaml. Without
    `create`, a folder that was never initialised raises StoreGone. `patience_s`: how long a transaction is retried
    while others hold the lock; `busy_timeout_s`: how long of it inside SQLite, where signals are not handled. Raises
    StoreError, Damaged, SettingsError.
    """
    source = "url" if url else "NIMBLE_JOBS_DB"
    url = url or os.environ.get("NIMBLE_JOBS_DB")
    if not url and (url := _configured(home)):
        source = f"{home / 'config.yaml'}: database"
    try:
        if url is None and not create:
            home_module.vouch(home, None)
        return _open(home, url, source, busy_timeout_s=busy_timeout_s, patience_s=patience_s)
    except StoreError:
        raise
    except OSError as e:
        raise StoreError(f"state folder {home}: {e.strerror}; choose another with --home") from e


def _configured(home: Path) -> str | None:
    if not (home / "config.yaml").exists():
        return None
    from nimble_jobs.settings.load import database_of  # loads pydantic, which listings do not need

    return database_of(home)


def _open(home: Path, url: str | None, source: str, *, busy_timeout_s: float, patience_s: float) -> Store:
    if url is None:
        home_module.check_database(home)
    known: str | None = None

    def vouch() -> None:
        if url is None:
            home_module.vouch(home, known)
        owner.refuse_other_file(Path(database.name), home)

    patience = Lent()
    database = Database(
        url or f"sqlite:///{home / home_module.DATABASE}",
        busy_timeout_s=busy_timeout_s,
        patience_s=patience_s,
        patience=patience,
        vouch=vouch,
        source=source,
    )
    try:
        new = database.is_sqlite and owner.refuse_others(database, home)
        database.migrate()
        if url is None:
            if not home_module.initialised(home):
                home_module.mark(home)
            known = home_module.identity(home)
        if new:
            owner.take(database, home)
    except BaseException:
        database.close()
        raise
    return Store(home, database, patience)
