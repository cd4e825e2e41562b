"""The history of the tables, one version per file. `create` makes the newest tables in an empty database."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, create_mock_engine

from nimble_jobs.store.tables import POSTGRESQL_WHERE

NEWEST = "0022"

VERSION = Table(  # as Alembic makes it
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def create(connection: Connection, tables: MetaData) -> None:
    """Make the tables of the newest version in an empty database, inside the connection's transaction.

    A test shows that they are what all versions in turn make. That takes ten times as long, and needs Alembic.
    """
    for statement in _statements(connection.dialect.name, tables):
        connection.exec_driver_sql(statement)
    connection.execute(VERSION.insert().values(version_num=NEWEST))


@cache
def _statements(dialect: str, tables: MetaData) -> tuple[str, ...]:
    """What makes these tables, compiled once in a process: that takes most of the time of making a store."""
    statements: list[str] = []
    if dialect == "postgresql":
        for index in (index for table in tables.tables.values() for index in table.indexes):
            index.dialect_options[dialect]["where"] = index.info.get(POSTGRESQL_WHERE)

    def note(statement: Any, *_args: Any, **_options: Any) -> None:
        statements.append(str(statement.compile(dialect=engine.dialect)))

    engine = create_mock_engine(f"{dialect}://", note)
    tables.create_all(engine, checkfirst=False)
    VERSION.create(engine)
    return tuple(statements)


def upgrade(connection: Connection) -> None:
    """Apply the missing versions inside the connection's transaction.

    Alembic loads only here: it costs as much as SQLAlchemy, and a current database does not need it.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
