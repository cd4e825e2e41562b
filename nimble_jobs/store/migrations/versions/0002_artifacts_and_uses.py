"""Adds a schedule's artifacts, what built it and how long that took, and counts of its uses.

Rows with a correct digest get a new one that covers the new columns. Damaged rows stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COVERED_BEFORE = (
    *("key", "format_version", "parts", "model", "device", "input", "dtype", "mode", "streams", "syncs"),
    *("replay_us", "eager_us", "bytes", "created_at"),
)
_COVERED = (*_COVERED_BEFORE, "build_s", "provenance")


def upgrade() -> None:
    op.create_table(
        "schedule_artifacts",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["key"], ["schedules.key"], name="fk_schedule_artifacts_key", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("key", "name", name="pk_schedule_artifacts"),
    )
    op.create_index("ix_schedule_artifacts_name", "schedule_artifacts", ["name"])
    op.create_table(
        "schedule_uses",
        sa.Column("hit", sa.String(length=10), nullable=False),
        sa.Column("reason", sa.String(length=200), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("saved_s", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("hit", "reason", name="pk_schedule_uses"),
    )
    # Added one by one: to make the table anew would let its texts go with the old one.
    op.add_column("schedules", sa.Column("build_s", sa.Double(), nullable=False, server_default="0"))
    op.add_column("schedules", sa.Column("provenance", sa.Text(), nullable=False, server_default="{}"))
    op.add_column("schedules", sa.Column("resident_hits", sa.BigInteger(), nullable=False, server_default="0"))
    connection = op.get_bind()
    for (key,) in connection.execute(sa.text("SELECT key FROM schedules ORDER BY key")).all():
        _complete(connection, key)


def _complete(connection: sa.Connection, key: str) -> None:
    query = sa.text("SELECT s.*, t.text FROM schedules s JOIN schedule_texts t ON t.key = s.key WHERE s.key = :key")
    row = connection.execute(query, {"key": key}).mappings().one_or_none()
    if row is None or _sha256(_json([{n: row[n] for n in _COVERED_BEFORE}, row["text"]])) != row["sha256"]:
        return
    raw = json.loads(row["text"])
    buffers, constants = raw["program"]["buffers"], raw["program"]["constants"]
    nbytes = {port["name"]: buffers[port["view"]["v"][0]]["nbytes"] for port in constants}
    artifacts = sorted([name, "constant", size] for name, size in nbytes.items())
    for name, kind, size in artifacts:
        insert = sa.text("INSERT INTO schedule_artifacts (key, name, kind, bytes) VALUES (:key, :name, :kind, :bytes)")
        connection.execute(insert, {"key": key, "name": name, "kind": kind, "bytes": size})
    covered = {n: row[n] for n in _COVERED} | {"build_s": float(raw["build_s"])}
    update = sa.text("UPDATE schedules SET build_s = :build_s, sha256 = :sha256 WHERE key = :key")
    digest = _sha256(_json([covered, artifacts, _sha256(row["text"])]))
    connection.execute(update, {"build_s": covered["build_s"], "sha256": digest, "key": key})


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
