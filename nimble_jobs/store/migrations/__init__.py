"""The history of the tables, one version per file. `upgrade` brings a database to the newest version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection

NEWEST = "0012"


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
