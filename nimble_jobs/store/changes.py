"""Executes statements that change rows, in batches that a statement can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, CursorResult, Delete, Executable, Update
from sqlalchemy.orm import Session

AT_ONCE = 1000  # ids in one statement: SQLite takes 32,766 values
AS_IT_IS = {"synchronize_session": False}  # execution options: the session holds none of the changed rows
_CONNECTION = "nimble_jobs.connection"  # where a session keeps its connection, as each question for it takes 15 µs


def changed(session: Session, statement: Update | Delete) -> int:
    """Execute, and return the number of changed rows."""
    result = session.execute(statement, execution_options=AS_IT_IS)
    assert isinstance(result, CursorResult)
    return result.rowcount


def run(session: Session, statement: Executable, **values: Any) -> CursorResult[Any]:
    """Execute a prepared statement over tables with these values. A session is for one transaction."""
    connection: Connection | None = session.info.get(_CONNECTION)
    if connection is None:
        connection = session.info[_CONNECTION] = session.connection()
    return connection.execute(statement, values)


def batched(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """The ids in batches that fit into one statement."""
    for first in range(0, len(ids), AT_ONCE):
        yield ids[first : first + AT_ONCE]
