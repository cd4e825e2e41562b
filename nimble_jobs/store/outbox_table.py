"""The table of notifications, which are written with the change that they report and sent later."""

from __future__ import annotations

from sqlalchemy import Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from nimble_jobs.store.tables import SERIAL, Base
from nimble_jobs.store.words import Words


class NoticeRow(Base):
    """One message for one address. It holds no secret, since variables in addresses are filled in when it is sent."""

    __tablename__ = "outbox"
    __table_args__ = (
        Index("ix_outbox_due", "state", "next_at"),
        Index("ix_outbox_job", "job", "seq"),
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(12), unique=True)
    event: Mapped[str] = mapped_column(String(20))  # started, succeeded, recovered, failed, quarantined, missed, test
    job: Mapped[str | None] = mapped_column(String(12))  # the job may be pruned before
    name: Mapped[str] = mapped_column(Words)  # of the job or the timer
    channel: Mapped[str] = mapped_column(String(12))  # webhook | command | ping; `unrouted` before targets are known
    target: Mapped[str] = mapped_column(Text)
    body: Mapped[str] = mapped_column(Text)  # JSON of the message, without the number of the attempt
    state: Mapped[str] = mapped_column(String(12))  # pending | sent | given_up
    attempts: Mapped[int] = mapped_column(Integer)
    next_at: Mapped[float]  # when it is tried next
    since: Mapped[float]  # it is given up a fixed time after this
    leased_until: Mapped[float | None]  # a sender holds a lease until then
    sender: Mapped[str | None] = mapped_column(Words)
    created_at: Mapped[float]
    sent_at: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(Words)  # of the last attempt
