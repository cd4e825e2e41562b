"""A store of an earlier version keeps its schedules, and its damage."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine

from nimble_jobs.errors import Damaged
from nimble_jobs.schedule import FORMAT_VERSION
from nimble_jobs.store import ArtifactRef, migrations, open_store
from nimble_jobs.store.home import DATABASE, resolve
from nimble_jobs.store.records import dump, sha256
from tests.store_samples import NOW, PARTS, a_schedule, key_of

_BEFORE = (
    *("key", "format_version", "parts", "model", "device", "input", "dtype", "mode", "streams", "syncs"),
    *("replay_us", "eager_us", "bytes", "created_at"),
)


def first_version(path: Path) -> None:
    """A database as version 0001 made it."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    engine.dispose()
    path.chmod(0o600)


def test_schedules_of_the_first_version(tmp_path: Path) -> None:
    """They are found as before, with their artifacts and build time; one that was damaged still is."""
    home = resolve(str(tmp_path / "home"))
    first_version(home / DATABASE)
    good, bad = (a_schedule(key_of(name), constant=b"abc", build_s=1.5) for name in ("good", "bad"))
    with closing(sqlite3.connect(home / DATABASE, isolation_level=None)) as connection:
        for schedule in (good, bad):
            text = schedule.to_json()
            values = (schedule.key, FORMAT_VERSION, dump(PARTS), "m", "cpu", "i", "fp32", "inference", 1, 0)
            row = dict(zip(_BEFORE, (*values, 10.25, 20.5, 100, NOW), strict=True))
            row |= {"sha256": sha256(dump([row, text])), "hits": 3, "last_used_at": NOW, "state": "ready", "refused": 0}
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO schedules ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
            connection.execute("INSERT INTO schedule_texts VALUES (?, ?)", (schedule.key, text))
        connection.execute("UPDATE schedules SET replay_us = 1 WHERE key = ?", (bad.key,))
    with open_store(home) as store:
        found = store.schedules.verified(good.key)
        assert found.load() == good
        assert (found.hits, found.resident_hits, found.build_s, found.provenance) == (3, 0, 1.5, {})
        assert found.artifacts == (ArtifactRef(name=good.program.constants[0].name, kind="constant", bytes=3),)
        with pytest.raises(Damaged):
            store.schedules.verified(bad.key)
