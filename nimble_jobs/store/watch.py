"""Notices cheaply whether anything was committed to the database since the last look."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from nimble_jobs.store.database import Database, FileId, file_id


class Watch:
    """Looks at one database, from one thread at a time. Other databases than SQLite count as changed at each look."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._connection: sqlite3.Connection | None = None
        self._file: FileId | None = None
        self._version: int | None = None

    def changed(self) -> bool:
        """Whether another connection, of any process, has committed since the last call; True at the first.

        SQLite counts commits in the file's header, and `PRAGMA data_version` compares that count: a read of one page.
        """
        if not self._db.is_sqlite:
            return True
        current = file_id(Path(self._db.name))
        if current is None or current != self._file:
            self.close()
        try:
            if self._connection is None:
                path = Path(self._db.name).absolute().as_uri()
                self._connection = sqlite3.connect(f"{path}?mode=ro", uri=True, timeout=1.0, check_same_thread=False)
                self._file = current
            version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error:  # the following read reports what is wrong with the database
            self.close()
            return True
        changed = version != self._version
        self._version = version
        return changed

    def close(self) -> None:
        """Close the connection. A further look opens another one."""
        connection, self._connection, self._version = self._connection, None, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()
