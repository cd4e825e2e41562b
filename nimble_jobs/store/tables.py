"""The tables. Migrations make them; a test holds the two together.

JSON is kept as text: a damaged value must not keep the other rows from being read. Free text is `Words`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import BigInteger, Double, ForeignKey, Index, Integer, MetaData, String, Text, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from nimble_jobs.store.words import Words

SERIAL = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only under the name INTEGER
# In the `info` of an index: its condition in PostgreSQL. As an argument of the index it would import the dialect.
POSTGRESQL_WHERE = "postgresql_where"


class Base(DeclarativeBase):
    """The base class, with conventions that migrations share."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double()}  # times need all 53 bits
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def _index_of_few(name: str, first: str, *more: str) -> Index:
    """An index without the rows whose first column is null, which most jobs are."""
    given = text(f"{first} IS NOT NULL")
    quoted = text(f'"{first}" IS NOT NULL')  # array is a word of PostgreSQL's own
    return Index(name, first, *more, sqlite_where=given, info={POSTGRESQL_WHERE: quoted})


class JobRow(Base):
    """One submitted spec. `seq` is the order of submission, independent of the clock."""

    __tablename__ = "jobs"
    __table_args__ = (
        # For `claim`: columns with equal values first, then the order, so that it stops at the first match.
        Index(
            "ix_jobs_claim",
            *("state", "foreground", "held", "blockers", "group_name", "rank", "seq", "not_before", "device"),
        ),
        _index_of_few("ix_jobs_group", "group_name", "state"),
        _index_of_few("ix_jobs_array", "array", "seq"),
        _index_of_few("ix_jobs_skipped", "skipped_by"),
        Index("ix_jobs_name", "name", "seq"),
        Index("ix_jobs_open", "name", "state"),
        Index("ix_jobs_state", "state", "seq"),
        Index("ix_jobs_kind", "kind", "seq"),
        # For `figures`: what a scrape asks, so that it reads no row, whose JSON is long.
        Index("ix_jobs_figures", "state", "kind", "foreground", "held", "blockers", "not_before", "queued_at"),
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(12), unique=True)
    name: Mapped[str] = mapped_column(Words)
    kind: Mapped[str] = mapped_column(String(20))
    state: Mapped[str] = mapped_column(String(12))
    priority: Mapped[int] = mapped_column(Integer)
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    max_attempts: Mapped[int] = mapped_column(Integer)
    device: Mapped[str] = mapped_column(String(20))
    foreground: Mapped[bool]
    key: Mapped[str | None] = mapped_column(Words, unique=True)
    after: Mapped[str] = mapped_column(Text)  # JSON list of ids, or of [id, when] where not success
    not_before: Mapped[float]
    timeout_s: Mapped[float | None]
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    worker: Mapped[str | None] = mapped_column(Words)
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    records_done: Mapped[int] = mapped_column(BigInteger, default=0)
    records_total: Mapped[int | None] = mapped_column(BigInteger)
    records_bad: Mapped[int] = mapped_column(BigInteger, default=0)
    phase: Mapped[str | None] = mapped_column(String(40))
    error: Mapped[str | None] = mapped_column(Words)
    allow_python: Mapped[str] = mapped_column(Text)  # JSON list
    spec_digest: Mapped[str] = mapped_column(String(64))  # SHA-256 of `spec`
    spec: Mapped[str] = mapped_column(Text)  # canonical JSON
    schedule: Mapped[str] = mapped_column(Text, default="{}")
    timings: Mapped[str] = mapped_column(Text, default="{}")
    outputs: Mapped[str] = mapped_column(Text, default="{}")
    # Fields for listings, so that they need not read the JSON above.
    output: Mapped[str | None] = mapped_column(Text)  # the spec's `output.path`
    hit: Mapped[str | None] = mapped_column(String(10))  # the schedule's
    runs: Mapped[str | None] = mapped_column(String(12))  # the schedule's
    rate: Mapped[float | None]  # records a second, as measured
    held: Mapped[bool] = mapped_column(default=False, server_default=false())
    blockers: Mapped[int] = mapped_column(Integer, default=0, server_default="0")  # number of its rows in `waits`
    group_name: Mapped[str | None] = mapped_column(String(100))
    array: Mapped[str | None] = mapped_column(String(12))
    array_index: Mapped[int | None] = mapped_column(Integer)
    queued_at: Mapped[float] = mapped_column(default=0.0, server_default="0")
    urgency: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    rank: Mapped[float] = mapped_column(
        default=0.0, server_default="0"
    )  # the lowest is claimed first; see `store.ranks`
    attempts_before: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    skipped_by: Mapped[str | None] = mapped_column(String(12))
    records_counted: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # part of `totals` already
    traceparent: Mapped[str | None] = mapped_column(String(55))  # W3C trace context of the submitter
    gpus: Mapped[int] = mapped_column(Integer, default=1, server_default="1")  # devices that may work on it at once
    # How many devices of one machine a training needs at once.
    world_size: Mapped[int] = mapped_column(Integer, default=1, server_default="1")


class GroupRow(Base):
    """A group of jobs with a limit on how many run at once, set by the job that was queued last."""

    __tablename__ = "job_groups"

    name: Mapped[str] = mapped_column(String(100), primary_key=True)
    most: Mapped[int] = mapped_column(Integer)


class QueueRow(Base):
    """A number that the ranks of all queued jobs depend on."""

    __tablename__ = "queue"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)  # aging_s
    value: Mapped[float]


class WaitRow(Base):
    """A queued job's wait for another job. The row is removed when the other job has ended as required."""

    __tablename__ = "waits"
    __table_args__ = (Index("ix_waits_parent", "parent"),)

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    parent: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    when: Mapped[str] = mapped_column(String(8), default="success", server_default="success")


class AttemptRow(Base):
    """One try at running a job."""

    __tablename__ = "attempts"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    worker: Mapped[str] = mapped_column(Words)
    started_at: Mapped[float]
    finished_at: Mapped[float | None]
    outcome: Mapped[str | None] = mapped_column(String(12))
    error: Mapped[str | None] = mapped_column(Words)
    bad_kinds: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")  # JSON: bad records by kind
    seal: Mapped[str | None] = mapped_column(String(32))  # secret key of the attempt's manifests, 128 bits in hex


class PublicationRow(Base):
    """A folder that a job published. It outlives the job, as the folder does."""

    __tablename__ = "publications"

    token: Mapped[str] = mapped_column(String(32), primary_key=True)  # random; in the folder's manifest
    job: Mapped[str] = mapped_column(String(12))
    path: Mapped[str] = mapped_column(Text)
    folder: Mapped[str] = mapped_column(String(41))  # DEVICE:INODE
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    at: Mapped[float]


class EventRow(Base):
    """An event. It outlives its job."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_job", "job", "seq"), {"sqlite_autoincrement": True})

    seq: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    at: Mapped[float]
    job: Mapped[str | None] = mapped_column(String(12))
    attempt: Mapped[int | None]
    kind: Mapped[str] = mapped_column(String(40))
    message: Mapped[str] = mapped_column(Words)
    data: Mapped[str] = mapped_column(Text)  # JSON object


class ScheduleRow(Base):
    """Facts about a stored schedule. `sha256` covers the columns above it, its artifacts, and its text."""

    __tablename__ = "schedules"

    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    format_version: Mapped[int]
    parts: Mapped[str] = mapped_column(Text)  # JSON object: every part of the key, readable
    model: Mapped[str] = mapped_column(Words)
    device: Mapped[str] = mapped_column(Words)
    input: Mapped[str] = mapped_column(Words)
    dtype: Mapped[str] = mapped_column(String(20))
    mode: Mapped[str] = mapped_column(String(20))
    streams: Mapped[int]
    syncs: Mapped[int]
    replay_us: Mapped[float]
    eager_us: Mapped[float]
    runs: Mapped[str] = mapped_column(String(12), server_default="schedule")  # schedule | eager; for listings
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    build_s: Mapped[float] = mapped_column(server_default="0")
    # JSON object: which software built it, and where.
    provenance: Mapped[str] = mapped_column(Text, server_default="{}")
    sha256: Mapped[str] = mapped_column(String(64))
    hits: Mapped[int] = mapped_column(BigInteger, default=0)
    resident_hits: Mapped[int] = mapped_column(BigInteger, server_default="0")  # of `hits`
    last_used_at: Mapped[float]
    state: Mapped[str] = mapped_column(String(12))  # ready | quarantined
    refused: Mapped[bool]  # quarantined because its results differ from eager
    reason: Mapped[str | None] = mapped_column(Words)
    quick_us: Mapped[float | None]  # a replay of eager's kernels on one stream: later builds learn from it


class ScheduleTextRow(Base):
    """The canonical JSON of a schedule, apart from its row, so that counting a hit does not rewrite megabytes."""

    __tablename__ = "schedule_texts"

    key: Mapped[str] = mapped_column(ForeignKey("schedules.key", ondelete="CASCADE"), primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class ScheduleArtifactRow(Base):
    """An artifact that a schedule needs."""

    __tablename__ = "schedule_artifacts"
    __table_args__ = (Index("ix_schedule_artifacts_name", "name"),)

    key: Mapped[str] = mapped_column(ForeignKey("schedules.key", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)  # its SHA-256
    kind: Mapped[str] = mapped_column(String(20))  # constant | kernels
    bytes: Mapped[int] = mapped_column(BigInteger)


class UseRow(Base):
    """Counts of all hits and misses. Removing a schedule does not change them."""

    __tablename__ = "schedule_uses"

    hit: Mapped[str] = mapped_column(String(10), primary_key=True)  # miss | stored | resident
    reason: Mapped[str] = mapped_column(String(200), primary_key=True)  # of a miss, without details
    count: Mapped[int] = mapped_column(BigInteger)
    saved_s: Mapped[float]  # build times of the schedules that were hit, added up
    last_at: Mapped[float]


class ResidentRow(Base):
    """A worker holds the captured graph of a schedule on its device."""

    __tablename__ = "residents"

    worker: Mapped[str] = mapped_column(Words, primary_key=True)
    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # device memory; 0 if unknown


class DailyRow(Base):
    """When a daily duty, which only one of many workers does, was done last."""

    __tablename__ = "daily"

    duty: Mapped[str] = mapped_column(String(40), primary_key=True)
    slot: Mapped[float]  # the moment when it was due
    at: Mapped[float]  # when a worker began it
