"""INSERT ... ON CONFLICT, which SQLAlchemy has for each database of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

POSTGRESQL, SQLITE = "postgresql", "sqlite"


class Upsert:
    """A statement for each database, made once, at its first use: to import the dialect of PostgreSQL takes 40 ms."""

    def __init__(self, make: Callable[[Callable[..., Any]], Any]) -> None:
        """`make` is given a database's function `insert`."""
        self._make = make
        self._made: dict[str, Any] = {}

    def of(self, session: Session) -> Any:
        """The statement for the session's database."""
        name = POSTGRESQL if session.get_bind().dialect.name == POSTGRESQL else SQLITE
        if name not in self._made:
            self._made[name] = self._make(importlib.import_module(f"sqlalchemy.dialects.{name}").insert)
        return self._made[name]
