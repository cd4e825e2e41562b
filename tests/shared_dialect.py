"""SQLite's dialect, one for all engines of a test process.

SQLAlchemy keeps compiled statements by the dialect that they were compiled for, and makes a dialect for each engine.
Tests open thousands of stores, each of which would compile the same statements again.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

_STATEMENTS = 2000  # that are kept
_compiled: LRUCache[Any, Any] = LRUCache(_STATEMENTS)


class SharedDialect(SQLiteDialect_pysqlite):
    """The same object each time that it is made."""

    supports_statement_cache = True
    _only: SharedDialect | None = None

    def __new__(cls, **_options: Any) -> SharedDialect:
        cls._only = cls._only or super().__new__(cls)
        return cls._only

    def __init__(self, **options: Any) -> None:
        if "dbapi" not in vars(self):
            super().__init__(**options)

    @classmethod
    def engine_created(cls, engine: Engine) -> None:
        engine.update_execution_options(compiled_cache=_compiled)


def install() -> None:
    """Have engines for `sqlite:` use it from now on."""
    registry.register("sqlite", __name__, SharedDialect.__name__)
