"""The tables of files that were scored, for jobs that score only what is new."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from nimble_jobs.store.tables import SERIAL, Base
from nimble_jobs.store.words import FileName, Words


class SeenSourceRow(Base):
    """A folder of files of which jobs of one name score only what is new."""

    __tablename__ = "seen_sources"
    __table_args__ = (UniqueConstraint("name", "root"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(Words)  # of the jobs, and of the timer that submits them
    root: Mapped[str] = mapped_column(FileName)


class SeenRunRow(Base):
    """A job that scored files of such a folder and succeeded. Kept when the job is removed."""

    __tablename__ = "seen_runs"
    __table_args__ = (Index("ix_seen_runs_source", "source"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    source: Mapped[int] = mapped_column(ForeignKey("seen_sources.id", ondelete="CASCADE"))
    job: Mapped[str] = mapped_column(String(12))
    model: Mapped[str] = mapped_column(String(64))  # SHA-256 of the model's identity
    listed_at: Mapped[float]
    at: Mapped[float]


class SeenFileRow(Base):
    """A file that such a job scored, as it was then. There may be millions: rows lie in the key's order, and alone."""

    __tablename__ = "seen_files"
    __table_args__ = ({"sqlite_with_rowid": False},)

    source: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    path: Mapped[str] = mapped_column(FileName, primary_key=True)  # below the root
    size: Mapped[int] = mapped_column(BigInteger)
    mtime_ns: Mapped[int] = mapped_column(BigInteger)
    run: Mapped[int] = mapped_column(BigInteger)  # of seen_runs
