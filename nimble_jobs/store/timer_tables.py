"""The tables of timers and of their ticks."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from nimble_jobs.store.tables import Base
from nimble_jobs.store.words import Words


class TimerRow(Base):
    """A spec that is submitted at each tick of its expression.

    Every tick after `since` and before `next_due` has a row in `ticks`, or is part of a row for several ticks.
    """

    __tablename__ = "timers"
    __table_args__ = (Index("ix_timers_due", "state", "next_at"),)

    name: Mapped[str] = mapped_column(Words, primary_key=True)
    state: Mapped[str] = mapped_column(String(12))  # active | paused
    since: Mapped[float]
    next_due: Mapped[int | None] = mapped_column(BigInteger)
    next_at: Mapped[float | None]  # `next_due` with its jitter
    moved_at: Mapped[float]  # the time by the clock when the columns above changed
    gap_from: Mapped[float | None]  # `moved_at` before the last absence
    gap_at: Mapped[float | None]  # the time by the clock at the end of that absence
    created_at: Mapped[float]
    edited_at: Mapped[float]
    file: Mapped[str] = mapped_column(Words)  # the spec's, for messages
    base: Mapped[str] = mapped_column(Text)  # the folder of that file
    allow_python: Mapped[str] = mapped_column(Text)  # JSON list
    digest: Mapped[str] = mapped_column(String(64))  # SHA-256 of `spec` and `allow_python`
    spec: Mapped[str] = mapped_column(Text)  # canonical JSON, with its templates unfilled
    last_success_at: Mapped[float | None]  # when a job of it last succeeded; the job may be pruned since


class TickRow(Base):
    """A moment when a timer was due, and its outcome."""

    __tablename__ = "ticks"
    __table_args__ = (
        Index("ix_ticks_job", "job"),
        Index("ix_ticks_outcome", "outcome", "timer", "due"),
    )

    timer: Mapped[str] = mapped_column(ForeignKey("timers.name", ondelete="CASCADE"), primary_key=True)
    due: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)  # Unix seconds
    until: Mapped[int | None] = mapped_column(BigInteger)  # the last one, if the row stands for several
    count: Mapped[int] = mapped_column(Integer, server_default="1")  # how many it stands for
    kind: Mapped[str] = mapped_column(String(12))  # scheduled | catch-up | backfill | manual
    outcome: Mapped[str] = mapped_column(String(12))  # submitted | waiting | skipped | missed | empty | error
    job: Mapped[str | None] = mapped_column(String(12))
    reason: Mapped[str | None] = mapped_column(Words)
    at: Mapped[float]  # when this was decided
    max_running: Mapped[int | None]  # for a backfill: how many of its jobs may be open at once
