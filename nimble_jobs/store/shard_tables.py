"""The tables of jobs that several devices work on: their shards, and the devices."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from nimble_jobs.store.tables import Base
from nimble_jobs.store.words import Words


class ShardRow(Base):
    """A shard of a running job. The rows are removed when the job has ended."""

    __tablename__ = "shards"
    __table_args__ = (Index("ix_shards_state", "job", "state", "index"),)

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(Integer, primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger)  # position of its first record
    stop: Mapped[int] = mapped_column(BigInteger)  # position behind its last record
    state: Mapped[str] = mapped_column(String(8))  # open | running | done | failed
    attempt: Mapped[int] = mapped_column(Integer, default=0)  # how often it was claimed
    failures: Mapped[int] = mapped_column(Integer, default=0)  # how often a member failed while it held it
    worker: Mapped[str | None] = mapped_column(Words)  # who works on it, or whose files won
    second: Mapped[str | None] = mapped_column(Words)  # who works on a second copy, because the first is slow
    error: Mapped[str | None] = mapped_column(Words)  # of the last failure


class MemberRow(Base):
    """A device that works, or worked, on an attempt at a job, under the id of its worker."""

    __tablename__ = "members"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    worker: Mapped[str] = mapped_column(Words, primary_key=True)
    device: Mapped[str] = mapped_column(String(20))
    joined_at: Mapped[float]
    left_at: Mapped[float | None]
    moved_at: Mapped[float]  # when it joined, began to work after it had held no shard, or finished one
    busy_s: Mapped[float] = mapped_column(server_default="0", default=0.0)  # from there until each shard was finished
    phase: Mapped[str | None] = mapped_column(String(40))
    records_done: Mapped[int] = mapped_column(BigInteger, default=0)  # in shards that it finished first
    failures: Mapped[int] = mapped_column(Integer, default=0)  # how often it died or failed
    error: Mapped[str | None] = mapped_column(Words)
    software: Mapped[str] = mapped_column(
        Text, default="{}", server_default="{}"
    )  # JSON object: see `machine.Software`
