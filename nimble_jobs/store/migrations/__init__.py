"""The history of the tables, one version per file. `create` makes the newest tables in an empty database."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table

NEWEST = "0015"

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
    tables.create_all(connection, checkfirst=False)
    VERSION.create(connection)
    connection.execute(VERSION.insert().values(version_num=NEWEST))


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
