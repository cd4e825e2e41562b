"""The table of workers with leases. PostgreSQL alone has it: in a SQLite file, workers are known by their locks."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import Double, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from nimble_jobs.store.tables import Base
from nimble_jobs.store.words import Words


class Shared(DeclarativeBase):
    """The base class of tables that only a database of several machines needs."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double()}
    metadata = MetaData(naming_convention=Base.metadata.naming_convention)


class WorkerRow(Shared):
    """A worker and its lease."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(Words, primary_key=True)  # random; never used again
    host: Mapped[str] = mapped_column(Words)
    boot: Mapped[str] = mapped_column(String(40))  # the id of the host's boot
    folder: Mapped[str] = mapped_column(String(41))  # DEVICE:INODE of the folder with its lock
    lease_until: Mapped[float]  # Unix seconds, by the database's clock; 0: over for good
    suspected_at: Mapped[float | None]  # since when others saw that it was not renewed; by the same clock
    info: Mapped[str] = mapped_column(Text)  # JSON object: what the worker tells about itself
