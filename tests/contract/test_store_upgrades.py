"""A PostgreSQL database of an earlier version ends up with the same tables as a new one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, create_engine

from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import postgres
from tests.store_samples import NOW, submit

QUERIES = (
    "SELECT table_name, column_name, data_type, character_maximum_length, is_nullable, column_default "
    "FROM information_schema.columns WHERE table_schema = current_schema() ORDER BY 1, 2",
    "SELECT tablename, indexname, replace(indexdef, current_schema() || '.', '') "
    "FROM pg_indexes WHERE schemaname = current_schema() ORDER BY 1, 2",
    "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = current_schema()::regnamespace ORDER BY 1, 2",
    "SELECT version_num FROM alembic_version",
)
BEFORE = (
    "DROP TABLE shards",
    "DROP TABLE members",
    "DROP TABLE task_times",
    "ALTER TABLE jobs DROP COLUMN gpus",
    "ALTER TABLE jobs DROP COLUMN world_size",
    "ALTER TABLE attempts DROP COLUMN seal",
    "ALTER TABLE workers DROP COLUMN suspected_at",
    "DROP INDEX ix_jobs_next",
    "UPDATE alembic_version SET version_num = '0015'",
)


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    engine = create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def tables(url: str) -> list[list[tuple[object, ...]]]:
    """Columns, indexes, constraints and the version."""
    with connected(url) as connection:
        return [[tuple(row) for row in connection.exec_driver_sql(query)] for query in QUERIES]


def test_an_upgraded_database_lacks_nothing(tmp_path: Path) -> None:
    """The first version on PostgreSQL was 0015, before shards, and without the index for claims. Upgraded, its columns,
    indexes and constraints are those of a new one, its jobs are still there, and jobs run in it.
    """
    with postgres.schema() as old, postgres.schema() as new:
        with open_store(resolve(str(tmp_path / "old")), old) as store:
            job = submit(store)
        made = tables(old)
        with connected(old) as connection:
            for statement in BEFORE:
                connection.exec_driver_sql(statement)
        assert tables(old) != made
        for name, url in (("old", old), ("new", new)):
            with open_store(resolve(str(tmp_path / name)), url) as store:
                assert [each.id for each in store.jobs.list()] == ([job.id] if name == "old" else [])
                submit(store)
                assert store.jobs.claim("w", device="cpu", now=NOW + 1) is not None
        for upgraded, expected in zip(tables(old), tables(new), strict=True):
            assert upgraded == expected
