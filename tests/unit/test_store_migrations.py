"""A store of an earlier version keeps its schedules, and its damage."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from nimble_jobs.errors import Damaged
from nimble_jobs.schedule import FORMAT_VERSION
from nimble_jobs.store import ArtifactRef, migrations, open_store
from nimble_jobs.store.home import DATABASE, resolve
from nimble_jobs.store.records import dump, sha256
from tests.store_samples import NOW, PARTS, a_schedule, key_of, queued

_BEFORE = (
    *("key", "format_version", "parts", "model", "device", "input", "dtype", "mode", "streams", "syncs"),
    *("replay_us", "eager_us", "bytes", "created_at"),
)


def config_of() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    return config


REVISIONS = [script.revision for script in ScriptDirectory.from_config(config_of()).walk_revisions()][::-1]


def of_version(revision: str, path: Path) -> None:
    """A database as this revision made it."""
    config, engine = config_of(), create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()
    path.chmod(0o600)


def test_versions_follow_each_other() -> None:
    """Each has a number of its own, the next one, and there is one last."""
    assert [f"{number:04}" for number in range(1, len(REVISIONS) + 1)] == REVISIONS


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_jobs_of_earlier_versions(tmp_path: Path, revision: str) -> None:
    """What ended stays as it was, what waits runs, and the database is sound."""
    tables = ("jobs", "attempts", "events")
    with open_store(resolve(str(tmp_path / "new"))) as store:
        for name in ("ended", "waits"):
            queued(store, spec={"version": 1}, name=name, kind="score", now=NOW)
        job = store.jobs.claim("w", device="cpu", now=NOW)
        assert job is not None
        store.jobs.finish(job.id, 1, outputs={"path": "/out"}, timings={"run_s": 1.0}, schedule={}, now=NOW)
        made = store.jobs.list()
        new = store.home / DATABASE
    home = resolve(str(tmp_path / "old"))
    of_version(revision, home / DATABASE)
    with closing(sqlite3.connect(home / DATABASE, isolation_level=None)) as connection:
        connection.execute("ATTACH DATABASE ? AS new", (str(new),))
        for table in tables:
            names = ", ".join(row[1] for row in connection.execute(f"PRAGMA main.table_info({table})"))
            connection.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM new.{table}")
    with open_store(home) as store:
        assert store.jobs.list() == made
        assert store.publications.outputs(job.id) == {"path": "/out"}
        assert [event.kind for event in store.jobs.events(job.id)] == ["submitted", "claimed", "succeeded"]
        assert store.check() == []
        waiting = store.jobs.claim("w", device="cpu", now=NOW)
        assert waiting is not None
        assert waiting.name == "waits"


def test_schedules_of_the_first_version(tmp_path: Path) -> None:
    """They are found as before, with their artifacts and build time; one that was damaged still is."""
    home = resolve(str(tmp_path / "home"))
    of_version("0001", home / DATABASE)
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
